"""Chooses the form of each part of a step, by a race on the device of rank 0.

A choice comes, in this order, from the settings of the run, from the checkpoint that it is resumed from, from the cache
of earlier races, and from a race. On a CPU nothing is raced: `auto` is `torch`.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass

import pytorch_lightning as pl
import torch
import torch._dynamo as dynamo
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

import nestguard
from nestdata import BatchPlan, last_error_line
from nestmodel.config import NestConfig
from nestmodel.errors import TrainingError
from nestmodel.nn.gpu.kernel_choice import Kernels, default_kernels, kernels_of
from nestmodel.training.starting.determinism import determinism
from nestmodel.tuning.cache import Result, cache_key, read_result, write_result
from nestmodel.tuning.parts import Precision, Setting, parts
from nestmodel.tuning.race import Limits, Race, Row
from nestmodel.tuning.stopwatch import stopwatch
from nestmodel.tuning.table import format_table
from nestmodel.tuning.whole_step import has_step_forms, step_part

_CUT_SHORT = "in a race that was cut short"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The form of each part, and where it was chosen; a checkpoint stores both."""

    kernels: Kernels
    device: str | None
    """Name of the device; None in checkpoints from before it was stored."""


def device_name(device: torch.device) -> str:
    """Returns the name of a device, equal for all devices of a kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def most_frequent_shape(plan: BatchPlan) -> tuple[int, int]:
    """Returns cuts and padded samples of the microbatches of which an epoch has most; the largest of several."""
    numbers: dict[tuple[int, int], int] = {}
    for bucket in plan.buckets:
        shape = bucket.cuts_per_microbatch, bucket.padded_samples
        numbers[shape] = numbers.get(shape, 0) + bucket.num_groups
    return max(numbers, key=lambda shape: (numbers[shape], shape[0] * shape[1]))


def choose_kernels(
    given: Kernels,
    stored: Choice | None,
    config: NestConfig,
    trainer: pl.Trainer,
    plan: BatchPlan | None,
    must_stop: Callable[[], bool],
) -> Choice:
    """Returns the form of each part, equal on all ranks. This is a collective operation.

    Args:
        given: The settings of the run; what is not `auto` is kept.
        stored: From the checkpoint; None for a new run.
        config: Of the model.
        trainer: Of the run.
        plan: Of the training data; without it, nothing is raced.
        must_stop: Whether the run has been asked to end. A race then ends early, and a resume races again.

    Raises:
        TrainingError: A form has left the device in a state in which nothing can be computed.
    """
    choice = None
    if trainer.is_global_zero:
        choice = _choose(given, stored, config, trainer, plan, must_stop)
    nestguard.current().beat(nestguard.Phase.STARTING)
    choice = trainer.strategy.broadcast(choice) if trainer.world_size > 1 else choice
    assert choice is not None
    return choice


def _choose(
    given: Kernels,
    stored: Choice | None,
    config: NestConfig,
    trainer: pl.Trainer,
    plan: BatchPlan | None,
    must_stop: Callable[[], bool],
) -> Choice:
    device = trainer.strategy.root_device
    name = device_name(device)
    if given.open_parts() and stored is not None:
        if stored.device in (None, name):
            return Choice(kernels=given.resolve(stored.kernels), device=name)
        rank_zero_info(f"the kernels of the checkpoint were chosen on {stored.device}: they are chosen anew on {name}.")
    if plan is None or not raced_parts(device, given):
        return Choice(kernels=given.resolve(default_kernels(device.type)), device=name)
    try:
        raced = race(given, config, trainer, plan, must_stop=must_stop)
    except TrainingError:
        raise
    except Exception as error:  # a run can do without a race, and other ranks wait for the choice
        rank_zero_warn(
            f"the forms of kernels are not raced ({last_error_line(error)}), and those without a race are used. Set "
            "model.kernels by hand to race none."
        )
        return Choice(kernels=given.resolve(default_kernels(device.type)), device=f"{name}, {_CUT_SHORT}")
    rank_zero_info(f"kernels for {name}:\n{format_table(raced)}")
    return Choice(kernels=given.resolve(raced.kernels), device=f"{name}, {_CUT_SHORT}" if must_stop() else name)


def raced_parts(device: torch.device, given: Kernels) -> list[str]:
    """Returns the parts whose forms are raced: on a GPU, those that are `auto`.

    In deterministic mode there are none: a choice by times could differ between runs that are to have equal bits.
    Tests replace this function, and the forms of `nestmodel.tuning.parts`, to race on a CPU.
    """
    return given.open_parts() if device.type == "cuda" and determinism() is not True else []


def race(
    given: Kernels,
    config: NestConfig,
    trainer: pl.Trainer,
    plan: BatchPlan,
    *,
    reads_cache: bool = True,
    must_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Races the forms of the parts that are `auto`, or takes the result of an earlier race from the cache.

    It runs on the device of this process, for the most frequent shape of the plan.

    Args:
        given: The settings of the run.
        config: Of the model.
        trainer: Of the run.
        plan: Of the training data.
        reads_cache: Whether the result of an earlier race counts. The new one is kept, unless time or memory was
            missing.
        must_stop: Ends the race early. Its result is then not kept.

    Raises:
        TrainingError: A form has left the device in a state in which nothing can be computed.
    """
    device = trainer.strategy.root_device
    num_cuts, num_samples = most_frequent_shape(plan)
    setting = Setting(
        config=config,
        num_cuts=num_cuts,
        num_samples=num_samples,
        num_shapes=plan.config.num_shapes,
        precision=str(trainer.precision),
    )
    name, names = device_name(device), raced_parts(device, given)
    if plan.config.microbatches_per_step == trainer.world_size > 1:
        names = [part for part in names if part != "step"]  # DDP's last microbatch of a step is never a graph
    key = cache_key(setting, name, determinism(), names, given)
    result = read_result(key) if reads_cache else None
    if result is None:
        seconds = num_samples / plan.sampling_rate
        rank_zero_info(f"racing kernels on {name}, for {num_cuts} cuts of {seconds:.1f} s.")
        if setting.num_shapes is None:
            rank_zero_info("data.plan.num_shapes is not set, so compiled forms and graphs take no part.")
        result = _raced(names, given, setting, _precision_of(trainer), must_stop)
        if not must_stop() and all(row.is_lasting for row in result.rows):
            write_result(key, result)
    return result


def _precision_of(trainer: pl.Trainer) -> Precision:
    plugin = trainer.precision_plugin
    return Precision(
        device=trainer.strategy.root_device, convert=plugin.convert_module, context=plugin.train_step_context
    )


def _raced(
    names: list[str], given: Kernels, setting: Setting, precision: Precision, must_stop: Callable[[], bool]
) -> Result:
    device = precision.device

    def beat() -> str:
        nestguard.current().beat(nestguard.Phase.STARTING)  # for the stall guard
        return "not tried, because the run is to end" if must_stop() else ""

    def taken(rows: list[Row]) -> Kernels:
        forms = {row.part: row.form for row in rows if row.verdict == "taken"}
        return kernels_of({**asdict(default_kernels(device.type)), **forms})

    with _clean_state(device):
        runner = Race(stopwatch(device), Limits(), _recovery(device), beat)
        rows = [row for part in parts(setting, precision, names) for row in runner.rows(part)]
        if "step" in names and has_step_forms(setting):
            rows += runner.rows(step_part(setting, precision, given.resolve(taken(rows))))
    return Result(device=device_name(device), kernels=taken(rows), rows=tuple(rows))


def _recovery(device: torch.device) -> Callable[[], None]:
    def recover() -> None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if a kernel has broken the context
            torch.cuda.empty_cache()

    return recover


@contextmanager
def _clean_state(device: torch.device) -> Iterator[None]:
    """Makes a device the current one. At the end, restores torch's generators and the settings of its compiler."""
    settings = ("optimize_ddp", "recompile_limit", "accumulated_recompile_limit")
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        dynamo.config.patch({name: getattr(dynamo.config, name) for name in settings}),
    ):
        try:
            yield
        finally:
            # Otherwise the graphs of the race would count towards the limit of those of the run.
            torch.compiler.reset()
