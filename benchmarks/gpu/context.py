"""What is measured and where: the device, the ranks, the extent of each section, the corpora and the time budget."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from benchmarks.gpu.report import Section
from benchmarks.peers.nemo_model import PRESETS
from nestdata import MixConfig, PlanConfig, PrepareConfig, prepare_corpus
from nestmodel import EncoderConfig, MaskConfig, NestConfig, NestDataModule, OptimizerConfig, QuantizerConfig

DEMO = Path(__file__).parents[2] / "manifests" / "demo"
RATE = 16000
T = TypeVar("T")


def tiny_config() -> NestConfig:
    """Returns a model of two blocks of dimension 16 with frequent masks, for the sections about the training loop."""
    return NestConfig(
        encoder=EncoderConfig(d_model=16, num_heads=2, num_layers=2, subsampling_channels=8),
        quantizer=QuantizerConfig(num_classes=32),
        masking=MaskConfig(prob=0.05),
        optimizer=OptimizerConfig(lr=1.0, warmup_steps=10),
    )


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured."""

    models: dict[str, NestConfig]
    """Models of the sections about speed, by name."""

    budgets: dict[str, float]
    """`max_batch_seconds` of each model."""

    more_budgets: tuple[float, ...]
    """Seconds of audio in a microbatch of the smallest model, for the section `budgets`."""

    compared: dict[str, dict[str, Any]]
    """Arguments of `benchmarks.peers.nemo_model.section` for the models that are compared with NeMo's, by name."""

    copied_bytes: int
    """Bytes of the copy in the section `ceilings`."""

    product_size: int
    """Rows and columns of the matrices that are multiplied there."""

    cut_seconds: tuple[float, ...]
    """Lengths of the cuts in the microbatches."""

    num_steps: int
    """Number of timed steps of each case, after a warm-up."""

    loop_model: NestConfig
    """Model of the sections `waits`, `resume` and `stalls`."""

    loop_steps: int
    """Number of steps before the checkpoint from which the section `resume` continues, and after it."""

    parity_seconds: float
    feed_seconds: float
    stall_seconds: float
    """Limit of the stall guard for a phase of a step."""

    compiles: bool
    """Whether compiled blocks are measured."""


def tiny_extent() -> Extent:
    """Returns the extent for a CPU: seconds."""
    return Extent(
        models={"tiny": tiny_config()},
        budgets={"tiny": 4.0},
        more_budgets=(4.0, 8.0),
        compared={"tiny": {"d_model": 16, "n_heads": 2, "n_layers": 2, "channels": 8, "num_classes": 32}},
        copied_bytes=10**7,
        product_size=256,
        cut_seconds=(2.0,),
        num_steps=1,
        loop_model=tiny_config(),
        loop_steps=1,
        parity_seconds=1.0,
        feed_seconds=0.05,
        stall_seconds=4.0,
        compiles=False,
    )


def full_extent(presets: Sequence[str], budgets: dict[str, float]) -> Extent:
    """Returns the extent for a GPU."""
    return Extent(
        models={name: NestConfig.preset(name) for name in presets},
        budgets=budgets,
        more_budgets=(240.0, 1000.0, 2000.0, 4000.0),
        compared={name: PRESETS[name] for name in ("large", "xlarge") if name in presets},
        copied_bytes=8 * 10**9,
        product_size=8192,
        cut_seconds=(15.0, 60.0),
        num_steps=10,
        loop_model=NestConfig.preset("demo"),
        loop_steps=10,
        parity_seconds=5.0,
        feed_seconds=3.0,
        stall_seconds=30.0,
        compiles=True,
    )


class _State(NamedTuple):
    """What a rank tells the others about the current section."""

    has_ended: bool
    has_time: bool
    error: str | None = None


@dataclass
class Context:
    """Device, ranks and corpora of a run, and the time that the current section has left."""

    device: torch.device
    extent: Extent
    directory: Path
    """Shared by all ranks of the node; deleted at the end."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    num_local_ranks: int = 1
    nemo_wheels: Path | None = None
    """Folder made by `benchmarks/nemo_wheels.py`."""

    sections: dict[str, Section] = field(default_factory=dict)
    """Results so far, of this start and of earlier ones; equal rows on all ranks at the start."""

    deadline_s: float = field(default=float("inf"))

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def has_time(self) -> bool:
        """Returns whether the current section has time left and no rank has ended it, equal on all ranks."""
        states = self._gather(_State(has_ended=False, has_time=time.monotonic() < self.deadline_s))
        return states[0].has_time and not any(state.has_ended for state in states)

    def pending(self, section: Section, cases: Iterable[T], row: Callable[[T], str]) -> Iterator[T]:
        """Yields the cases whose rows are not finished, as long as there is time; frees memory after each.

        Args:
            section: Receives the rows, and a note if the time is over.
            cases: All cases of the section, those first that decide most.
            row: Returns the name of a case's row.
        """
        for case in cases:
            if section.has(row(case)):
                continue
            if not self.has_time():
                section.cut(row(case))
                return
            yield case
            self.free_memory()

    def end_section(self, error: str | None) -> list[str | None]:
        """Waits until all ranks have ended the current section; returns the error of each rank.

        A rank that fails ends early. It then takes part in the exchanges of `has_time` of the others.
        """
        while True:
            states = self._gather(_State(has_ended=True, has_time=False, error=error))
            if all(state.has_ended for state in states):
                return [state.error for state in states]

    def _gather(self, state: _State) -> list[_State]:
        if self.world_size == 1:
            return [state]
        states: list[Any] = [None] * self.world_size
        dist.all_gather_object(states, state)
        return states

    def from_first_rank(self, value: Any) -> Any:
        """Returns the value of rank 0 on all ranks."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def synchronize(self) -> None:
        """Waits until the device has computed everything."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Frees memory of the GPU that nothing uses any more."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def single_trainer(self, precision: Any = None, **settings: Any) -> pl.Trainer:
        """Returns a trainer of one rank for steps that each rank makes by itself, in bf16-mixed on a GPU."""
        return pl.Trainer(
            accelerator="gpu" if self.is_cuda else "cpu",
            devices=[self.local_rank] if self.is_cuda else 1,
            precision=precision or ("bf16-mixed" if self.is_cuda else "32-true"),
            plugins=[LightningEnvironment()],
            **{**_QUIET, **settings},
        )

    def loop_trainer(self, directory: Path, callbacks: Sequence[pl.Callback] = (), **settings: Any) -> pl.Trainer:
        """Returns a trainer of all ranks for the training loop."""
        defaults: dict[str, Any] = {
            **_QUIET,
            "accelerator": "gpu" if self.is_cuda else "cpu",
            "devices": self.num_local_ranks,
            "num_nodes": self.num_nodes,
            "strategy": "ddp" if self.world_size > 1 else "auto",
            "precision": "bf16-mixed" if self.is_cuda else "32-true",
            "default_root_dir": directory,
            "use_distributed_sampler": False,
            "limit_val_batches": 0,
            "enable_checkpointing": True,
        }
        return pl.Trainer(**{**defaults, **settings}, callbacks=list(callbacks))

    def demo_data(self, *, pcm: bool = False, num_workers: int = 0, seconds: float = 12.0) -> NestDataModule:
        """Returns the demo corpus, with or without a sample bank, as the data of a run."""
        speech = self.directory / ("pcm.corpus" if pcm else "speech.corpus")
        plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=max(2, self.world_size))
        noise = self.directory / "noise.corpus"
        return NestDataModule(speech, noise, None, plan, MixConfig(prob=0.5), num_workers=num_workers)

    def prepare_corpora(self) -> None:
        """Prepares the demo corpora once on each node."""
        if self.local_rank == 0:
            prepare_corpus([DEMO / "speech.json"], self.directory / "speech.corpus", PrepareConfig(), jobs=1)
            prepare_corpus([DEMO / "speech.json"], self.directory / "pcm.corpus", PrepareConfig(pcm=True), jobs=1)
            prepare_corpus([DEMO / "noise.json"], self.directory / "noise.corpus", PrepareConfig(pcm=True), jobs=1)
        if self.world_size > 1:
            dist.barrier()


_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
