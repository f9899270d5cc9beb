"""The forms of a training step that are compared, and section `forms`: each one beside the first, in the order A B B A.

A form gives each part of the model one of several implementations of the same computation. This module is the only
place that knows how to select them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.context import RATE, Context
from benchmarks.gpu.measuring import median, profile_call, spread
from benchmarks.gpu.report import Row, Section
from nestdata import PackedBatch
from nestmodel import NestConfig, NestNetwork
from nestmodel.nn.gpu.forms import PLAIN, Forms
from nestmodel.nn.gpu.step_graph import CudaCapture
from nestmodel.out_of_memory import is_out_of_memory
from nestmodel.preflight.measure.trial_step import Shape, TrialStep, noise_batch

_NUM_WARM_UP = 2
_WORTH = 1.02
"""A form is taken as the best one if it is faster by this factor; less may be noise."""


_EAGER = Forms(subsampling_kernel=True, compiled=False)


@dataclass(frozen=True)
class Form:
    """Implementations of the parts of a step."""

    forms: Forms = _EAGER
    is_graph: bool = False
    is_checkpointed: bool = False
    compiler: Mapping[str, Any] = field(default_factory=dict)
    """Settings of torch's compiler, by their names in `torch._inductor.config`."""

    @property
    def needs_gpu(self) -> bool:
        """Whether it is measured on a GPU only: with graphs, or with torch's compiler, which takes long on a CPU."""
        return self.is_graph or self.forms.compiled


_COMPILED = Forms(subsampling_kernel=True, compiled=True, num_shapes=1)

BASE = "eager"
FORMS = {
    BASE: Form(),
    "compiled": Form(_COMPILED),
    "graph": Form(is_graph=True),
    "compiled, graph": Form(_COMPILED, is_graph=True),
    "compiled for varying shapes": Form(replace(_COMPILED, num_shapes=None)),
    "torch's subsampling": Form(PLAIN),
    "checkpointed": Form(is_checkpointed=True),
    "compiled, separate reductions": Form(_COMPILED, compiler={"triton.mix_order_reduction": False}),
}
"""All forms by name, those first that decide most."""


def build_network(config: NestConfig, form: Form) -> NestNetwork:
    """Returns the network in a form; it computes under `settings_of`."""
    torch.compiler.reset()  # torch compiles a function for a limited number of shapes, over all cases
    network = NestNetwork(config)
    network.use_forms(form.forms)
    return network


class StepSample(NamedTuple):
    """Milliseconds of one step of one microbatch."""

    step_ms: float
    host_ms: float
    """Until the host had launched the forward and backward pass; see `StepTime.host_s`."""

    optimizer_ms: float
    gpu_ms: float | None
    """From the start to the end on the GPU, by events; None on a CPU."""


class Trial:
    """A training step of a form."""

    def __init__(self, context: Context, config: NestConfig, form: Form) -> None:
        torch.compiler.reset()
        self._context, self._form = context, form
        encoder = replace(config.encoder, checkpoint_activations=form.is_checkpointed)
        with settings_of(self._form):
            self._step = TrialStep(
                replace(config, encoder=encoder),
                context.single_trainer(),
                forms=form.forms,
                capture=CudaCapture() if form.is_graph else None,
            )

    def __call__(self, batch: PackedBatch) -> StepSample:
        """Makes one step."""
        if self._context.is_cuda:
            batch = batch.pin_memory()  # before the first event; loaders do it in a thread of their own
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._context.is_cuda else []
        with settings_of(self._form):
            if events:
                events[0].record()
            time = self._step(batch)
            if events:
                events[1].record()
        self._context.synchronize()
        gpu_ms = events[0].elapsed_time(events[1]) if events else None
        return StepSample(1000 * time.total_s, 1000 * time.host_s, 1000 * time.optimizer_s, gpu_ms)

    def warm_up(self, batch: PackedBatch) -> None:
        """Compiles, allocates, and lets libraries choose their algorithms."""
        for _ in range(_NUM_WARM_UP):
            self(batch)


@contextmanager
def settings_of(form: Form) -> Iterator[None]:
    """Selects what a form changes for the whole process."""
    if not form.compiler:
        yield
        return
    import torch._inductor.config as inductor

    with inductor.patch(dict(form.compiler)):
        yield


@dataclass(frozen=True)
class Case:
    """A model and the shape of its microbatch, in one form."""

    model: str
    shape: Shape
    form: str = BASE

    @property
    def row(self) -> str:
        """Name of the row."""
        return f"{self.model}, {self.audio}, {self.form}"

    @property
    def audio(self) -> str:
        """Number and length of the cuts."""
        return f"{self.shape[0]} x {self.shape[1] / RATE:g} s"

    @property
    def audio_seconds(self) -> float:
        """Audio of the microbatch."""
        return self.shape[0] * self.shape[1] / RATE

    def halved(self) -> "Case":
        """Returns the case with half the number of cuts."""
        return replace(self, shape=(max(1, self.shape[0] // 2), self.shape[1]))


def case_of(context: Context, model: str, seconds: float, form: str = BASE, budget: float | None = None) -> Case:
    """Returns the case with cuts of a length, for the budget of the model or another one."""
    budget = budget or context.extent.budgets[model]
    return Case(model, (max(1, int(budget / seconds)), round(seconds * RATE)), form)


def measure_forms(context: Context, section: Section) -> None:
    """Adds a row for each model and form, with the times of the first form from the same minute."""
    if not context.extent.compiles:
        section.notes.append("Compiled forms are measured on a GPU only.")
    cases = [
        case_of(context, model, context.extent.cut_seconds[0], name)
        for name, form in FORMS.items()
        if name != BASE and (context.extent.compiles or not form.needs_gpu)
        for model in reversed(context.extent.models)
    ]
    for case in context.pending(section, cases, lambda case: case.row):
        section.add(*fitting(context, case, _beside_base))


def _beside_base(context: Context, case: Case) -> Row:
    config, batch = context.extent.models[case.model], noise_batch(case.shape)
    names = (BASE, case.form)
    trials = [Trial(context, config, FORMS[name]) for name in names]
    for trial in trials:
        trial.warm_up(batch)
    number = max(1, context.extent.num_steps // 2)
    samples: list[list[StepSample]] = [[], []]
    for side in (0, 1, 1, 0):
        trials[side](batch)
        samples[side] += [trials[side](batch) for _ in range(number)]
    steps = [[sample.step_ms for sample in found] for found in samples]
    found = profile_call(context, lambda: trials[1](batch))
    return {
        "row": case.row,
        "result": "measured",
        f"{BASE}, ms": median(steps[0]),
        "step, ms": median(steps[1]),
        "gain": median(steps[0]) / median(steps[1]),
        "spread": max(spread(each) for each in steps),
        "host, ms": median(sample.host_ms for sample in samples[1]),
        "busy, ms": found.busy_ms,
        "launches": found.num_launches or None,
        "kernels" if context.is_cuda else "operations": sum(kernel.number for kernel in found.kernels),
    }


def best_form(context: Context, model: str) -> str:
    """Returns the name of the fastest form of the section `forms` that keeps its activations, equal on all ranks."""
    rows = context.sections["forms"].rows if "forms" in context.sections else []
    gains = {BASE: _WORTH}
    for row in rows:
        name, _, form = row["row"].split(", ", 2)
        if name == model and "gain" in row and not FORMS[form].is_checkpointed:
            gains[form] = row["gain"]
    return str(context.from_first_rank(max(gains, key=lambda form: gains[form])))


def fitting(context: Context, case: Case, measure: Callable[[Context, Case], Row]) -> list[Row]:
    """Returns the row of a case; if memory runs out, a row that says so, and then that of half as many cuts.

    Args:
        context: The device.
        case: What to measure.
        measure: Returns the row of a case.
    """
    rows: list[Row] = []
    while True:
        try:
            return [*rows, measure(context, case)]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # After the handler, which keeps the tensors of its frames alive.
        context.free_memory()
        rows.append({"row": case.row, "result": "out of memory"})
        if case.shape[0] == 1:
            return rows
        case = case.halved()
