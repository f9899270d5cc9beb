"""Tries inputs, and counts them."""

import pickle
import tempfile
import time
import zlib
from collections import Counter
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.inputs import CREATED_BY_COMMANDS
from tests.fuzz.limits import Usage, limited
from tests.fuzz.target import Target

_INPUTS_AT_A_TIME = 200


@dataclass
class Counts:
    """What the inputs of one target came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    highest_cpu_s: float = 0.0
    highest_bytes: int = 0

    def add(self, outcome: str, usage: Usage) -> None:
        """Counts one input."""
        self.outcomes[outcome] += 1
        self.highest_cpu_s = max(self.highest_cpu_s, usage.cpu_s)
        self.highest_bytes = max(self.highest_bytes, usage.num_bytes)


def try_input(target: Target, example: Any) -> tuple[str, Usage]:
    """Reads one input; returns what came of it: `accepted`, `refused`, or the name of the error that refused it.

    Raises:
        Crash: It took too long, or too much memory.
        Exception: Any error that is not one of the target's, which is a crash as well.
    """
    try:
        # The working directory, since relative paths of Lhotse start from it, and commands would write there.
        with tempfile.TemporaryDirectory() as folder, chdir(folder), limited() as usage:
            try:
                outcome = "accepted" if target.read(example, Path(folder)) else "refused"
            except target.errors as error:
                outcome = type(error).__name__
            assert not Path(folder, CREATED_BY_COMMANDS).exists(), "a command was run"
    except BaseException as crash:
        crash.add_note(f"The input, as a pickle: {_keep(example)}")
        raise
    return outcome, usage


def _keep(example: Any) -> Path:
    """Writes an input to a file, because hypothesis shows only the beginning of a long one; returns its path."""
    content = pickle.dumps(example)
    path = Path(tempfile.gettempdir()) / "nest-fuzz" / f"{zlib.crc32(content):08x}.pickle"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def fuzz(target: Target, seconds: float, start: int, counts: Counts) -> None:
    """Tries new inputs for some seconds.

    Args:
        target: What reads them.
        seconds: How long, at least.
        start: Decides which inputs are drawn.
        counts: What came of them is added here.

    Raises:
        Exception: An input is a crash. Hypothesis makes it as small as it can, and shows it.
    """
    begin, number = time.monotonic(), start
    while time.monotonic() - begin < seconds:

        @seed(number)
        @settings(
            max_examples=_INPUTS_AT_A_TIME,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs())
        def check(example: Any) -> None:
            counts.add(*try_input(target, example))

        try:
            check()
        finally:
            counts.seconds = time.monotonic() - begin
        number += 1
