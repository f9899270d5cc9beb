"""How long a process may go without a heartbeat before the run counts as stalled."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from nestguard.observe.view import GuardError, NodeSilence, Phase, Reading

_PHASE_LIMITS = {
    Phase.STARTING: "first_step_s",
    Phase.LOADING: "step_s",
    Phase.FORWARD: "step_s",
    Phase.BACKWARD: "step_s",
    Phase.COLLECTIVE: "step_s",
    Phase.OPTIMIZER: "step_s",
    Phase.VALIDATION: "validation_s",
    Phase.CHECKPOINT: "checkpoint_s",
    Phase.FINISHING: "finishing_s",
}


@dataclass(frozen=True, kw_only=True)
class StallLimits:
    """Time without a heartbeat, in seconds of CLOCK_MONOTONIC, after which a run counts as stalled."""

    step_s: float = 300.0
    """Limit in each phase of a step: loading, forward, backward, collective, optimizer."""

    first_step_s: float = 870.0
    """Minimum of every limit until a rank has finished its first step, which compiles kernels and fills caches."""

    validation_s: float = 870.0
    """Limit during validation."""

    checkpoint_s: float = 870.0
    """Limit while a state is copied for a checkpoint, or while training waits until one is written."""

    finishing_s: float = 300.0
    """Limit after the last step."""

    node_silence_s: float = 60.0
    """Limit for messages from the monitor of another node."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0.0 < value < math.inf:
                raise GuardError(f"limits.{field.name} is {value}: expected a positive number of seconds.")

    @property
    def shortest_s(self) -> float:
        """The smallest of all limits."""
        shortest: float = min(dataclasses.astuple(self))
        return shortest

    @property
    def longest_wait_s(self) -> float:
        """The longest time that a rank can wait in a collective before a stall is reported.

        The rank that it waits for may use up the largest limit, after a validation or a checkpoint within its limit.
        """
        largest = max(self.step_s, self.first_step_s, self.validation_s, self.checkpoint_s, self.finishing_s)
        return largest + self.exempt_s

    @property
    def exempt_s(self) -> float:
        """Time by which a rank may be late because others wait for its validation or checkpoint."""
        return max(self.validation_s, self.checkpoint_s)

    def limit_of(self, reading: Reading) -> float:
        """Returns the limit, in seconds, that applies in a process's current phase; infinity once it has ended."""
        if reading.phase.is_final:
            return math.inf
        limit: float = getattr(self, _PHASE_LIMITS[reading.phase])
        return limit if reading.has_stepped else max(limit, self.first_step_s)


def too_long(silences: Mapping[int, NodeSilence], limits: StallLimits) -> dict[int, NodeSilence]:
    """Returns the nodes that have been silent for longer than the limit."""
    return {node: silence for node, silence in silences.items() if silence.seconds > limits.node_silence_s}
