"""How long a run may be silent before it counts as stalled."""

import dataclasses
import math
from dataclasses import dataclass

from nestguard.errors import GuardError
from nestguard.record import Phase, Reading

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
    """Seconds, by CLOCK_MONOTONIC, without a sign of life after which a run is stalled."""

    step_s: float = 300.0
    """In a phase of a step: loading, forward, backward, a collective, the optimizer."""

    first_step_s: float = 900.0
    """At least so many until a rank has finished its first step, which compiles and fills caches."""

    validation_s: float = 900.0
    """In validation."""

    checkpoint_s: float = 900.0
    """While a checkpoint is written."""

    finishing_s: float = 300.0
    """After the last step."""

    node_silence_s: float = 60.0
    """Without a word from the monitor of another node."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0.0 < value < math.inf:
                raise GuardError(f"limits.{field.name} is {value}: expected a positive number of seconds.")

    @property
    def shortest_s(self) -> float:
        """The shortest of them."""
        shortest: float = min(dataclasses.astuple(self))
        return shortest

    def limit_of(self, reading: Reading) -> float:
        """Seconds that a process may be silent in the phase that it is in; infinite once it has ended."""
        if reading.phase.is_final:
            return math.inf
        limit: float = getattr(self, _PHASE_LIMITS[reading.phase])
        return limit if reading.has_stepped else max(limit, self.first_step_s)
