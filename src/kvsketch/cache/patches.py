"""Wrappers around functions of other libraries. Each can be removed.

A `Patch` runs `around(original, *args, **kwargs)` in the place of one function of a module, class or object. Removing
it puts the function back. If other code has wrapped it since, that wrapper stays, and ours only passes calls on.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()
_standing: list[Patch] = []  # those that stay until `uninstall`
_ABSENT: Any = object()


class Patch:
    """One wrapped function: `install` to keep it until `remove`, or `hold` and `release` for a while."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._wrapper: Any = None
        self._before: Any = _ABSENT  # what the owner itself held under the name, not what it inherits
        self._working = [False]  # a list, which the wrapper reads at every call
        self.holders = 0

    def install(self) -> None:
        """Wraps the function; does nothing the second time."""
        with _lock:
            if self not in _standing:
                _standing.append(self)
            self._put_on()

    def remove(self) -> None:
        """Removes the wrapper, also from under wrappers of other code."""
        with _lock:
            if self in _standing:
                _standing.remove(self)
            if not self.holders:
                self._take_off()

    def hold(self) -> None:
        """Wraps the function until as many `release` have followed."""
        with _lock:
            self.holders += 1
            self._put_on()

    def release(self) -> None:
        with _lock:
            self.holders -= 1
            if not self.holders and self not in _standing:
                self._take_off()

    def _put_on(self) -> None:
        if self._wrapper is not None and self._is_in_the_chain():
            self._working[0] = True
            return
        # Other code has replaced or hidden our wrapper; it may still be called, so it must do nothing.
        self._working[0] = False
        self._before = vars(self._owner).get(self._name, _ABSENT)
        original, around = getattr(self._owner, self._name), self._around
        working = self._working = [True]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if working[0] else original(*args, **kwargs)

        self._wrapper = wrapper
        setattr(self._owner, self._name, wrapper)

    def _take_off(self) -> None:
        self._working[0] = False
        if self._wrapper is None or vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        self._wrapper, self._before = None, _ABSENT

    def _is_in_the_chain(self) -> bool:
        present = vars(self._owner).get(self._name)
        return present is not None and inspect.unwrap(present, stop=lambda f: f is self._wrapper) is self._wrapper


def uninstall() -> None:
    """Removes every wrapper of kvsketch from transformers. The next `CompressedCache` installs them again.

    Until then existing caches do not work.
    """
    with _lock:
        for patch in list(_standing):
            patch.remove()
