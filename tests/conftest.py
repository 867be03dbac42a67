"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Hypothesis tries the same inputs in every run; KVSKETCH_FUZZ asks for so many new ones.

KVSKETCH_NAN=1 fills memory that nobody has written with NaN, or with the largest number of its type: a test that reads
it then fails on every machine. torch does so in its deterministic mode only. Operations without a deterministic kind
warn there and run as ever.

The built-in model of the tests is the smallest. Another one would be fetched, hundreds of MB, without a word.

Some files come first, see `FIRST`: what takes minutes, so that no process works on it alone at the end, and what waits
for sockets, browsers and clocks, because `make check` begins with more processes than cores: others use the time.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.interpreter import hasten

TESTS = Path(__file__).parent
FIRST = (
    "ops/test_compile.py",
    "serve/test_page.py",
    "serve/test_connections.py",
    "serve/test_server.py",
    "serve/test_clients.py",
    "serve/test_documents.py",
    "cache/test_faults.py",
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Sorts files; the tests of a file stay as they are."""
    places = {TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))


# Commands fit no model by themselves, see `cli/test_first_fit.py`.
os.environ.setdefault("KVSKETCH_FIT", "never")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError, AttributeError):
        hasten()
# However long an input takes: the machine may have much else to do.
settings.register_profile(
    "repeatable",
    derandomize="KVSKETCH_FUZZ" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
if os.environ.get("KVSKETCH_NAN") == "1":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _no_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Late: nothing may import Triton before its interpreter is chosen.
    from kvsketch.models import loading
    from kvsketch.models.catalog import CATALOG

    own = loading._from_packages

    def small(card: Any, *given: Any) -> Path:
        assert card.name == "smollm2-135m" or card.name not in CATALOG, f"a test loads {card.name}"
        return own(card, *given)

    monkeypatch.setattr(loading, "_from_packages", small)
