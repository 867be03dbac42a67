"""Real models by short name, local folder, .gguf file or hub name."""

from kvsketch.models.catalog import CATALOG, DEFAULT_MODEL, ModelCard, Part, card
from kvsketch.models.fetch import is_pulled, pull, remove_model
from kvsketch.models.files import FetchError, WrongHashError, home
from kvsketch.models.loading import encode_chat, load, resolve

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "FetchError",
    "ModelCard",
    "Part",
    "WrongHashError",
    "card",
    "encode_chat",
    "home",
    "is_pulled",
    "load",
    "pull",
    "remove_model",
    "resolve",
]
