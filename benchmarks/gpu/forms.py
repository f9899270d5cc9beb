"""The forms of a training step that are compared; all of them compute the same values, up to rounding."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import device as Device

from nestmodel import NestModel
from nestmodel.nn.gpu.forms import Forms
from nestmodel.nn.gpu.step_graph import Capture, CudaCapture


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a form uses."""

    subsampling_kernel: bool = True
    """The first two stages of the subsampling as one kernel, instead of operations of torch."""

    compiled: bool = False
    """Features and blocks are compiled by torch."""

    has_fixed_shapes: bool = False
    """Compiled for the one shape that is measured, instead of for varying shapes."""

    graph: bool = False
    """Forward and backward pass of a microbatch are replayed as CUDA graphs."""

    in_ddp: bool = False
    """DDP has wrapped the model, and made a step with its hooks, before graphs are captured."""

    @property
    def has_varying_shapes(self) -> bool:
        """Whether the code is compiled for varying shapes, which a batch of another length has to come before."""
        return self.compiled and not self.has_fixed_shapes


REFERENCE = "torch"
"""The form with operations of torch only."""

PLAIN = "plain"

FORMS = {
    REFERENCE: Form(subsampling_kernel=False),
    PLAIN: Form(),
    "compiled": Form(compiled=True),
    "compiled-fixed": Form(compiled=True, has_fixed_shapes=True),
    "graph": Form(graph=True),
    "compiled-fixed-graph": Form(compiled=True, has_fixed_shapes=True, graph=True),
    "graph-in-ddp": Form(graph=True, in_ddp=True),
}
"""All forms by name."""

TIMED = ("compiled", PLAIN, "compiled-fixed", "compiled-fixed-graph", "graph", REFERENCE)
"""Forms whose steps are timed, those first that decide most."""


def checked_forms(preset: str) -> tuple[str, ...]:
    """Returns the forms whose results are compared with float32."""
    return TIMED + (("graph-in-ddp",) if preset == "small" else ())


def set_form(model: NestModel, form: Form, capture: Capture) -> None:
    """Gives a model a form; steps are prepared afterwards.

    Args:
        model: In training mode, with a trainer.
        form: The form.
        capture: Captures graphs.
    """
    torch.compiler.reset()
    forms = Forms(
        subsampling_kernel=form.subsampling_kernel,
        compiled=form.compiled,
        num_shapes=1 if form.has_fixed_shapes else None,
    )
    model.use_forms(forms)
    model.use_graphs(1, capture if form.graph else None)


class CountedCapture:
    """Captures graphs and counts how often they are replayed."""

    def __init__(self, device: Device) -> None:
        if device.type == "cuda":
            self._capture: Capture = CudaCapture()
        else:
            self._capture = importlib.import_module("tests.tape").TapeCapture()
        self.num_replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures a graph."""
        replay = self._capture(work)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted
