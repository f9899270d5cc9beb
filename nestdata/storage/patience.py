"""Repeats a failed request after a random pause, until it succeeds or the patience ends."""

import logging
import random
import threading
import time
from collections.abc import Callable

from nestdata.errors import StorageError
from nestdata.redaction import redacted
from nestdata.storage.config import StorageConfig
from nestdata.storage.failures import Failure
from nestdata.storage.info import StatsCounter

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0

_WARN_AFTER_S = 5.0
_WARN_EVERY_S = 30.0

logger = logging.getLogger(__name__)

# Pauses must differ between processes, and decide nothing about a batch, so they have no key.
_jitter = random.SystemRandom()

_last_warning_s = -_WARN_EVERY_S


class Patience:
    """The pauses of one request, and the error at their end.

    The pauses grow by decorrelated jitter: each is drawn between 0.1 s and three times the one before, at most 15 s
    (Amazon, "Exponential Backoff And Jitter", 2015), so that many readers do not come back at the same moment.
    """

    def __init__(
        self,
        location: str,
        config: StorageConfig,
        stats: StatsCounter,
        *,
        stop: threading.Event | None = None,
        was_reached: Callable[[], bool] = lambda: True,
    ) -> None:
        """Starts the clock.

        Args:
            location: For messages.
            config: The patience.
            stats: Where retries are counted.
            stop: Ends the pauses if it is set.
            was_reached: Returns whether the server has answered this process before.
        """
        self._location = location
        self._config = config
        self._stats = stats
        self._stop = stop
        self._was_reached = was_reached
        self._num_tries = 0
        self._pause_s = SHORTEST_PAUSE_S
        self._has_warned = False
        self._started = time.monotonic()

    def made_progress(self) -> None:
        """Restarts the clock, since bytes have arrived."""
        self._started = time.monotonic()
        self._pause_s = SHORTEST_PAUSE_S

    def failed(self, failure: Failure, *, num_tries: int = 1) -> None:
        """Waits before the next try.

        Args:
            failure: Of the last try.
            num_tries: How many tries this was, for the message.

        Raises:
            StorageError: The failure is not transient, the patience has ended, or `stop` is set.
        """
        self._num_tries += num_tries
        if not failure.is_transient:
            problem = f"{self._location}: {failure.reason}"
            raise StorageError.because(failure.kind, _sentences(problem, failure.cure))
        stop = self._stop or threading.Event()
        waited = time.monotonic() - self._started
        patience = self._patience_s(failure)
        if waited >= patience or stop.is_set():
            raise StorageError.because(failure.kind, self._gave_up(failure, waited))
        if waited >= _WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            location, reason = redacted(self._location), failure.reason
            _warn("%s: %s, for %.0f s; trying again for up to %.0f s", location, reason, waited, patience)
        self._pause_s = min(LONGEST_PAUSE_S, _jitter.uniform(SHORTEST_PAUSE_S, 3 * self._pause_s))
        stop.wait(min(self._pause_s, patience - waited))
        self._stats.add(retries=1)

    def _patience_s(self, failure: Failure) -> float:
        if failure.is_unreachable and not self._was_reached():
            return min(self._config.first_contact_s, self._config.patience_s)
        return self._config.patience_s

    def _gave_up(self, failure: Failure, waited: float) -> str:
        tries = f"{self._num_tries} {'try' if self._num_tries == 1 else 'tries'} in {waited:.0f} s"
        cure = failure.cure or "Check the store and the network, or wait longer (patience_s)."
        return _sentences(f"{self._location}: {failure.reason}, after {tries}", cure)


def _warn(message: str, *values: object) -> None:
    """Logs a warning, unless another request has done so just now: an outage concerns all of them."""
    global _last_warning_s
    now = time.monotonic()
    if now - _last_warning_s >= _WARN_EVERY_S:
        _last_warning_s = now
        logger.warning(message, *values)


def _sentences(problem: str, cure: str) -> str:
    return f"{problem}. {cure}".rstrip()
