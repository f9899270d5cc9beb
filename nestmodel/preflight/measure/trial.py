"""One trial: whether optimizer steps of given shapes fit into the memory of a device, and how long they take.

The check of the training step runs trials in its own process, the search for a budget in child processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.preflight.measure.memory import PeakMemory
from nestmodel.preflight.measure.trial_step import Shape, StepTime, TrialStep, noise_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """The outcome of a trial."""

    too_large: Shape | None
    """The shape whose step does not fit into memory; None if all steps fit."""

    peak_bytes: int
    """Peak memory; 0 if the trial does not fit."""

    allowed_bytes: int
    """Memory that the steps were allowed to use: the limit without the margin; 0 if there was no limit."""

    times: tuple[StepTime, ...]
    """Times of the second step of each shape, in the order of the shapes; fewer if one did not fit."""

    error: str = ""
    """Message of the allocation that failed, if this process made it."""


def run_shapes(
    make_step: Callable[[], TrialStep],
    shapes: list[Shape],
    *,
    device: torch.device,
    allowed_bytes: int,
    with_ddp: bool,
    on_step: Callable[[], None] = lambda: None,
) -> TrialResult:
    """Runs two optimizer steps of each shape, in order, until one of them does not fit.

    The first step of a shape allocates moments and gradients, and compiles; the second one needs them besides its
    activations, and is captured if steps are graphs.

    Args:
        make_step: Builds the model, whose memory is a part of that of the trial.
        shapes: The shapes, at least one.
        device: The device of the steps.
        allowed_bytes: Peak memory above which a shape does not fit; 0 if only a failed allocation counts.
        with_ddp: Whether DDP's copy of the gradients is in memory.
        on_step: Called after each step.
    """
    memory, times = PeakMemory(device), list[StepTime]()

    def result(too_large: Shape | None, peak_bytes: int = 0, error: str = "") -> TrialResult:
        return TrialResult(
            too_large=too_large, peak_bytes=peak_bytes, allowed_bytes=allowed_bytes, times=tuple(times), error=error
        )

    try:
        step = make_step()
        copy = torch.ones(step.num_trained if with_ddp else 0, device=device)
        for shape in shapes:
            for _ in range(2):
                time = step(noise_batch(shape))
                on_step()
            times.append(time)
            if allowed_bytes and memory.peak_bytes() > allowed_bytes:
                return result(shape)
        del copy
        return result(None, memory.peak_bytes())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The message only, because the traceback of the error keeps all tensors alive.
        return result(shapes[len(times)], error=str(error) or type(error).__name__)
