"""Forms of the subsampling with planted times and errors, so that a race can run on a CPU.

Both forms are the same on a CPU, so what a run computes does not depend on the choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestmodel import Kernels
from nestmodel.training.starting import kernel_race
from nestmodel.tuning.race import Part, Run


@dataclass(frozen=True)
class Planted:
    """Computes nothing but an error, in a planted time."""

    seconds: float
    error: float = 0.0

    def __call__(self) -> Sequence[Tensor]:
        return [torch.ones(8) + self.error]


def plant_forms(
    set_attribute: Callable[[object, str, object], None], torch_form: Planted, triton_form: Planted
) -> list[list[str]]:
    """Makes runs on a CPU race the planted forms; returns a list that receives the parts of each race.

    Args:
        set_attribute: `setattr`, or that of a monkeypatch.
        torch_form: Stands for the plain form.
        triton_form: Stands for the kernel.
    """
    races: list[list[str]] = []

    def parts(_setting: object, _precision: object, names: list[str]) -> list[Part]:
        races.append(names)
        forms = {"torch": lambda: torch_form, "triton": lambda: triton_form}
        return [Part(name=name, reference=lambda: Planted(1.0), forms=forms, ulp=1e-7) for name in names]

    def raced_parts(_device: object, given: Kernels) -> list[str]:
        return [name for name in given.open_parts() if name == "subsampling"]

    def measure(run: Run, _seconds: float) -> list[float]:
        assert isinstance(run, Planted)
        return [run.seconds]

    set_attribute(kernel_race, "raced_parts", raced_parts)
    set_attribute(kernel_race, "parts", parts)
    set_attribute(kernel_race, "stopwatch", lambda _device: measure)
    return races
