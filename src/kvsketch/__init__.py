"""kvsketch keeps the KV cache of long-context language models small, and says what that costs."""

from __future__ import annotations

from kvsketch import methods, ops
from kvsketch.cache import CompressedCache
from kvsketch.decoding import generate
from kvsketch.methods import METHODS, parse_method
from kvsketch.sessions import use

__version__ = "0.1.0"
__all__ = ["METHODS", "CompressedCache", "__version__", "generate", "methods", "ops", "parse_method", "use"]
