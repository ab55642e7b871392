"""What is computed from a whole index: once per commit, in the background, never too often."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fisherhash.errors import FisherhashError, UsageError

T = TypeVar("T")
logger = logging.getLogger(__name__)
REST = 20.0
"""A value is computed again at the earliest after this many times the seconds that it took."""


class Derived(Generic[T]):
    """A value that belongs to a version of an index.

    A reader gets the newest value there is. If it is outdated, another one is computed in a thread;
    beside a busy writer, which changes the version all the time, that happens now and then only.

    Args:
        version: returns the version of the index.
        compute: returns the value.
    """

    def __init__(self, version: Callable[[], Hashable], compute: Callable[[], T]) -> None:
        self._version, self._compute = version, compute
        self._changed = threading.Condition()
        self._value: T | None = None
        self._of: Hashable = None
        self._error: Exception | None = None
        self._running, self._rests_until = False, 0.0

    def get(self, wait: float = 0.0) -> T | None:
        """The newest value, None if there is none yet.

        Args:
            wait: how many seconds to wait for a value of the current version.

        Raises:
            FisherhashError: the value could not be computed.
        """
        version = self._version()
        with self._changed:
            resting = self._value is not None and time.monotonic() < self._rests_until
            if self._of != version and not self._running and not resting:
                self._running, self._error = True, None
                threading.Thread(target=self._run, args=(version,), daemon=True).start()
            self._changed.wait_for(lambda: not self._running or self._of == version, wait)
            if self._error is not None and self._value is None:
                if isinstance(self._error, FisherhashError):
                    raise self._error
                raise FisherhashError(str(self._error)) from self._error
            return self._value

    def _run(self, version: Hashable) -> None:
        began, error, value = time.monotonic(), None, None
        try:
            value = self._compute()
        except Exception as reason:  # whatever it is, a reader is told, and the thread ends
            # At the end of the process everything fails, and nobody reads it.
            if threading.main_thread().is_alive() and not isinstance(reason, UsageError):
                logger.warning("could not compute a part of the page: %s", reason)
            error = reason
        with self._changed:
            self._error, self._running = error, False
            if error is None:
                self._value, self._of = value, version
            ended = time.monotonic()
            self._rests_until = ended + REST * (ended - began)
            self._changed.notify_all()
