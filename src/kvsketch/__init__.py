"""kvsketch keeps the KV cache of long-context language models small, and says what that costs.

Names are imported at first use, so that `kvsketch --help` does not wait for torch and transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsketch import methods, models, ops, texts
    from kvsketch.cache import CompressedCache
    from kvsketch.decoding import generate
    from kvsketch.methods import METHODS, parse_method
    from kvsketch.patches import uninstall
    from kvsketch.sessions import use
    from kvsketch.streaming import prefill

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "CompressedCache",
    "__version__",
    "generate",
    "methods",
    "models",
    "ops",
    "parse_method",
    "prefill",
    "texts",
    "uninstall",
    "use",
]

_MODULE_OF = {
    "CompressedCache": "kvsketch.cache",
    "METHODS": "kvsketch.methods",
    "generate": "kvsketch.decoding",
    "methods": "kvsketch.methods",
    "models": "kvsketch.models",
    "ops": "kvsketch.ops",
    "parse_method": "kvsketch.methods",
    "prefill": "kvsketch.streaming",
    "texts": "kvsketch.texts",
    "uninstall": "kvsketch.patches",
    "use": "kvsketch.sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvsketch' has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    value = module if module.__name__ == f"kvsketch.{name}" else getattr(module, name)
    globals()[name] = value
    return value
