"""kvsketch keeps the KV cache of long-context language models small, and says what that costs.

Names are imported at first use, so that `kvsketch --help` does not wait for torch and transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsketch import methods, models, ops
    from kvsketch.cache.compressed import CompressedCache
    from kvsketch.cache.patches import uninstall
    from kvsketch.cache.replay.compaction import Span
    from kvsketch.cache.sessions import use
    from kvsketch.cache.streaming import prefill
    from kvsketch.decode.asking import ask, read
    from kvsketch.decode.captured import generate
    from kvsketch.methods import METHODS, parse_method
    from kvsketch.models import texts

__version__ = "0.2.0"
__all__ = [
    "METHODS",
    "CompressedCache",
    "Span",
    "__version__",
    "ask",
    "generate",
    "methods",
    "models",
    "ops",
    "parse_method",
    "prefill",
    "read",
    "texts",
    "uninstall",
    "use",
]

_MODULE_OF = {
    "CompressedCache": "kvsketch.cache.compressed",
    "METHODS": "kvsketch.methods",
    "Span": "kvsketch.cache.replay.compaction",
    "ask": "kvsketch.decode.asking",
    "generate": "kvsketch.decode.captured",
    "methods": "kvsketch.methods",
    "models": "kvsketch.models",
    "ops": "kvsketch.ops",
    "parse_method": "kvsketch.methods",
    "prefill": "kvsketch.cache.streaming",
    "read": "kvsketch.decode.asking",
    "texts": "kvsketch.models.texts",
    "uninstall": "kvsketch.cache.patches",
    "use": "kvsketch.cache.sessions",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvsketch' has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value
