"""Sections `waits`, `deterministic` and `resume`: the training loop of Lightning with our module and data."""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.context import Context
from benchmarks.gpu.forms import BASE, FORMS, Trial, case_of
from benchmarks.gpu.measuring import median, spread
from benchmarks.gpu.report import Section
from nestdata import AudioNoiseBatch
from nestmodel import Checkpoints, Health, NestModel, Throughput
from nestmodel.preflight.measure.trial_step import noise_batch
from nestmodel.training.starting.determinism import REQUIRED

_SYNC_WARNING = "synchronizing CUDA operation"
_CPU_WAITS = {"_local_scalar_dense", "nonzero"}
"""Operations whose result the CPU needs. On a GPU each is a wait."""

_FIRST, _LAST = 2, 4
"""The waits of the steps from the first to before the last one are counted."""


@dataclass
class WaitCounter(pl.Callback):
    """Counts the waits of the host for the device, from the start of one step to the start of another."""

    is_cuda: bool
    places: Counter[str] = field(default_factory=Counter)
    """Waits by source line on a GPU, and by operation on a CPU."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _seen: Any = None
    _has_ended: bool = False

    def on_train_batch_start(
        self, _trainer: pl.Trainer, _module: pl.LightningModule, batch: AudioNoiseBatch, _index: int
    ) -> None:
        """Starts or ends the count."""
        if batch.key.step == _FIRST and self._seen is None and not self._has_ended:
            self._start()
        elif batch.key.step >= _LAST:
            self.stop()

    def _start(self) -> None:
        if not self.is_cuda:
            self._seen = self._stack.enter_context(_CpuWaits())
            return
        self._seen = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        self._stack.callback(torch.cuda.set_sync_debug_mode, "default")

    def stop(self) -> None:
        """Ends the count, if it has begun."""
        self._stack.close()
        self._has_ended = self._has_ended or self._seen is not None
        if self._seen is None:
            return
        if self.is_cuda:
            found = [f"{Path(w.filename).name}:{w.lineno}" for w in self._seen if _SYNC_WARNING in str(w.message)]
        else:
            found = self._seen.names
        self.places.update(found)
        self._seen = None


class _CpuWaits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names += [name] if name in _CPU_WAITS else []
        return func(*args, **(kwargs or {}))


def measure_waits(context: Context, section: Section) -> None:
    """Adds the waits of the host in an optimizer step of the training loop, with the callbacks of `nestmodel fit`."""
    counter = WaitCounter(context.is_cuda)
    trainer = context.loop_trainer(
        context.directory / "waits", [Throughput(), Health(), counter], max_steps=_LAST + 1, log_every_n_steps=50
    )
    data = context.demo_data()
    _fit(context, _model(context), trainer, data)
    counter.stop()
    steps = _LAST - _FIRST
    microbatches = data.train_dataset.plan.config.microbatches_per_step // context.world_size
    section.rows.clear()
    section.rows.append(
        {"row": "waits a step", "value": sum(counter.places.values()) / steps, "microbatches a rank": microbatches}
    )
    for place, number in counter.places.most_common():
        section.rows.append({"row": place, "value": number / steps})
    kind = (
        "implicit synchronisations that torch reports"
        if context.is_cuda
        else "operations whose result the CPU needs, including those on tensors that a GPU run keeps on the CPU"
    )
    section.notes.append(f"Counted: {kind}, in steps {_FIRST} to {_LAST - 1}.")


def measure_deterministic(context: Context, section: Section) -> None:
    """Adds the time of a step with and without deterministic algorithms, for each model."""
    seconds = context.extent.cut_seconds[0]
    cases = [case_of(context, model, seconds).halved() for model in reversed(context.extent.models)]
    for case in context.pending(section, cases, lambda case: f"{case.model}, {case.audio}"):
        batch = noise_batch(case.shape)
        samples: dict[bool, list[float]] = {}
        trial = Trial(context, context.extent.models[case.model], FORMS[BASE])
        for is_deterministic in (False, True, True, False):
            with _algorithms(is_deterministic):
                trial.warm_up(batch)
                found = [trial(batch).step_ms for _ in range(max(1, context.extent.num_steps // 2))]
                samples[is_deterministic] = samples.get(is_deterministic, []) + found
        del trial
        section.add(
            {
                "row": f"{case.model}, {case.audio}",
                "step, ms": median(samples[False]),
                "deterministic, ms": median(samples[True]),
                "price": median(samples[True]) / median(samples[False]),
                "spread": max(spread(found) for found in samples.values()),
            }
        )
    section.notes.append(
        ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in REQUIRED) + " in both modes."
    )


def measure_resume(context: Context, section: Section) -> None:
    """Adds whether two equal runs, and a run that is resumed half way, have equal bits, in both modes."""
    half = context.extent.loop_steps
    for mode in context.pending(section, ("default", "deterministic"), str):
        with _algorithms(mode == "deterministic"):
            first = _run(context, f"{mode}-1", 2 * half)
            second = _run(context, f"{mode}-2", 2 * half)
            saved = context.directory / f"{mode}-1" / "saved" / f"step_{half:08d}.ckpt"
            resumed = _run(context, f"{mode}-resumed", 2 * half, saved)
        section.add(
            {
                "row": mode,
                "steps": f"{half} + {half}",
                "equal runs have equal bits": first == second,
                "a resumed run has equal bits": first == resumed,
            }
        )
    section.notes.append("Compared: all weights and buffers after the last step, as bytes.")


def _model(context: Context) -> NestModel:
    return NestModel(context.extent.loop_model)


def _run(context: Context, name: str, max_steps: int, ckpt_path: Path | None = None) -> str:
    """Trains and returns a digest of the weights."""
    directory = context.directory / name
    saver = Checkpoints(every_n_steps=context.extent.loop_steps, keep=10, directory=directory / "saved")
    deterministic = torch.are_deterministic_algorithms_enabled()
    trainer = context.loop_trainer(directory, [saver], max_steps=max_steps, deterministic=deterministic)
    model = _model(context)
    _fit(context, model, trainer, context.demo_data(), ckpt_path)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    context.free_memory()
    return digest.hexdigest()


def _fit(context: Context, model: NestModel, trainer: pl.Trainer, data: Any, ckpt_path: Path | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    context.free_memory()


@contextmanager
def _algorithms(is_deterministic: bool) -> Iterator[None]:
    """Turns torch's deterministic algorithms on or off, and restores the mode at the end."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
