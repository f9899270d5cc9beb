"""Runs the preflight on all ranks: five checks, in the order in which they follow here.

A check that raises an error on a rank has failed on that rank, and the other checks continue. If a rank does not
answer in time, it is named and the preflight ends. Nothing is trained or written.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch

from nestdata import BadCut, PlanConfig, last_error_line, microbatches, share_of_speech
from nestmodel.errors import TrainingError
from nestmodel.preflight.exchange import StoreExchange
from nestmodel.preflight.memory import gigabytes, usable_bytes
from nestmodel.preflight.preflight_config import MEMORY_MARGIN, PreflightConfig
from nestmodel.preflight.preflight_report import CheckReport, CheckResult, PreflightReport, Status
from nestmodel.preflight.ranks import compare_ranks, rank_settings
from nestmodel.preflight.shards import check_shards
from nestmodel.preflight.trial import clean_up, describe_shapes, largest_shapes, run_shapes, trial_step_of
from nestmodel.run_config import CheckpointConfig
from nestmodel.training.data import NestDataModule
from nestmodel.training.lightning_private import launched_processes, set_process_group_timeout
from nestmodel.training.module import NestModel, check_sampling_rate
from nestmodel.training.saving.checkpoints import savers_of

_BYTES_PER_PARAMETER = 12  # a weight and the two moments of AdamW in float32
_MAX_SHOWN = 5

_WAITING_RATIO = 0.5
"""Steps clearly wait for the loader if it gives less than this share of what they take."""

_SWAPPED_MARGIN = 0.3
"""Speech and noise seem to be swapped if the share of speech in the noise is this much larger than in the speech. It is
0.5 to 0.85 in recorded prompts and dialogue, and 0.01 in music and effects."""

_LAUNCHED_TIMEOUT_S = 20.0

RankResults = list[CheckResult | None]
"""Results of one check, one per rank; None for a rank that did not answer in time."""


def run_preflight(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: PreflightConfig = PreflightConfig(),
    on_report: Callable[[PreflightReport], None] | None = None,
) -> PreflightReport:
    """Runs all checks on all ranks.

    Ranks are started as by `trainer.fit`. With several ranks, call `fit` on another trainer afterwards.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        config: Extent of the preflight.
        on_report: Called on rank 0 before any rank returns, because some launchers end all ranks as soon as one exits.

    Returns:
        The report; it is equal on all ranks.

    Raises:
        TrainingError: The ranks could not form a process group, or rank 0 does not answer.
    """
    launcher: Any = trainer.strategy.launcher
    if launcher is None:
        return _run(model, data, trainer, config, on_report)
    return cast(PreflightReport, launcher.launch(_run, model, data, trainer, config, on_report))


def _run(
    model: NestModel,
    data: NestDataModule,
    trainer: pl.Trainer,
    config: PreflightConfig,
    on_report: Callable[[PreflightReport], None] | None,
) -> PreflightReport:
    with _process_group(trainer, config.timeout_s):
        exchange = StoreExchange(trainer.global_rank, trainer.world_size, config.timeout_s)
        missing = CheckResult(
            status="failed",
            value="no answer",
            advice=f"did not answer within {config.timeout_s:g} s. Look at its output, and at its machine.",
        )
        checks = []
        for name, results in _results_of_checks(model, data, trainer, config, exchange):
            checks.append(CheckReport(name=name, ranks=tuple(result or missing for result in results)))
            if None in results:
                break
        device = str(trainer.strategy.root_device.type)
        report = PreflightReport(world_size=trainer.world_size, device=device, checks=tuple(checks))
        if trainer.is_global_zero and on_report is not None:
            on_report(report)
        _finish(trainer, exchange)
    return report


def _results_of_checks(
    model: NestModel, data: NestDataModule, trainer: pl.Trainer, config: PreflightConfig, exchange: StoreExchange
) -> Iterator[tuple[str, RankResults]]:
    """Yields the name of each check and its results, which are equal on all ranks."""

    def on_all_ranks(name: str, check: Callable[[], CheckResult]) -> tuple[str, RankResults]:
        try:
            result = check()
        except Exception as error:
            result = CheckResult(status="failed", value=type(error).__name__, advice=last_error_line(error))
        results = [
            None if fields is None else CheckResult(**{**fields, "notes": tuple(fields["notes"])})
            for fields in exchange.all_gather(name, asdict(result))
        ]
        own = results[trainer.global_rank]
        figures.update(own.figures if own is not None else {})
        return name, results

    figures: dict[str, float] = {}  # of this rank
    yield on_all_ranks("step", lambda: check_step(model, data, trainer))
    yield on_all_ranks("shards", lambda: check_shards(data, trainer, config.timeout_s))
    # A loader would wait for a store that does not answer, for longer than the others wait for this rank.
    if figures.get("unreachable_shards"):
        unread = CheckResult(status="skipped", value="shards cannot be reached")
        yield on_all_ranks("audio", lambda: unread)
    else:
        step_rate = figures.get("step_audio_s_per_s")
        yield on_all_ranks("audio", lambda: check_audio(data, trainer, config.num_batches, step_rate))
    yield on_all_ranks("disk", lambda: check_disk(model, trainer))
    if trainer.world_size == 1:
        yield "ranks", [CheckResult(status="skipped", value="one rank")]
        return
    gathered = exchange.all_gather("settings", rank_settings(model, data, trainer))
    if None in gathered:  # a collective would wait for the rank that has not answered
        answered = CheckResult(status="skipped", value="not compared")
        yield "ranks", [None if settings is None else answered for settings in gathered]
        return
    # NCCL aborts the process at the full timeout, before it could report a result.
    device, timeout_s = trainer.strategy.root_device, config.timeout_s / 2
    yield on_all_ranks("ranks", lambda: compare_ranks(gathered, trainer.global_rank, device, timeout_s))


def check_step(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Measures time and memory of optimizer steps on noise of the largest shapes, with a second model.

    Gradients are kept from step to step, as a run keeps them from microbatch to microbatch.
    """
    check_sampling_rate(model.config, data.sampling_rate)
    plan, device = data.plan, trainer.strategy.root_device
    shapes, rate = largest_shapes(plan), data.sampling_rate
    total = usable_bytes(device, max(1, trainer.world_size // trainer.num_nodes))
    make_step = partial(trial_step_of, model.config, model.backend_name, trainer, plan.config, shapes)
    with clean_up(device):
        found = run_shapes(make_step, shapes, device=device, allowed_bytes=0, with_ddp=trainer.world_size > 1)
    budget = f"data.plan.max_batch_seconds (now {plan.config.max_batch_seconds:g})"
    remedy = f"Lower {budget}, of which --find-budget finds the largest that fits."
    if found.too_large:
        shape, error = describe_shapes([found.too_large], rate), found.error.splitlines()[0].removesuffix(".")
        advice = f"a batch of {shape} does not fit: {error}. {remedy}"
        return CheckResult(status="failed", value=f"out of memory, {gigabytes(total)} in total", advice=advice)
    seconds, (num_cuts, num_samples) = found.seconds[0], shapes[0]
    figures = {
        "peak_bytes": float(found.peak_bytes),
        "total_bytes": float(total),
        "step_seconds": max(found.seconds),
        "step_audio_s_per_s": num_cuts * num_samples / rate / seconds,
    }
    value = (
        f"{gigabytes(found.peak_bytes)} of {gigabytes(total)}, {max(found.seconds):.2f} s, "
        f"{describe_shapes(shapes, rate)}"
    )
    if total and found.peak_bytes > (1 - MEMORY_MARGIN) * total:
        advice = f"the step uses {100 * found.peak_bytes / total:.0f} % of the memory. {remedy}"
        return CheckResult(status="warning", value=value, advice=advice, figures=figures)
    notes = budget_note(plan.config, found.peak_bytes, total, trainer.world_size) if device.type == "cuda" else ()
    return CheckResult(status="ok", value=value, figures=figures, notes=notes)


def budget_note(plan: PlanConfig, peak_bytes: int, total_bytes: int, num_ranks: int) -> tuple[str, ...]:
    """Returns the options for microbatches of twice the size in steps of the same size, if the memory allows them.

    Args:
        plan: Settings of the batches.
        peak_bytes: Peak memory of a step. Twice the audio takes less than twice of it.
        total_bytes: Memory of the device.
        num_ranks: Ranks, which have to divide the microbatches.
    """
    half, is_odd = divmod(plan.microbatches_per_step, 2)
    if is_odd or half % num_ranks or 2 * peak_bytes > (1 - MEMORY_MARGIN) * total_bytes:
        return ()
    options = f"--max-batch-seconds {2 * plan.max_batch_seconds:g} --microbatches-per-step {half}"
    return (f"the memory allows half as many microbatches of twice the size: for a new run, {options}",)


def check_audio(
    data: NestDataModule, trainer: pl.Trainer, num_batches: int, step_rate: float | None = None
) -> CheckResult:
    """Reads the first batches of this rank with the configured loader workers, from step 0.

    If the speech detector is installed, it also reports in which share of the speech and of the noise it hears speech.

    Args:
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        num_batches: Number of batches; at least three for each worker are read.
        step_rate: Seconds of audio that a step takes in a second; None if unknown.

    Raises:
        NestError: Audio cannot be read, or the microbatches of a step cannot be divided among the ranks.
    """
    num_first = max(1, data.num_workers)  # batches arrive in bursts of one per worker, the first ones after its start
    num_batches = max(num_batches, 3 * num_first)
    plan = data.plan
    indices = microbatches(plan, rank=trainer.global_rank, world_size=trainer.world_size, num_steps=num_batches)
    on_gpu = trainer.strategy.root_device.type == "cuda"
    loader = data.loader_of(data.train_dataset, indices[:num_batches], on_gpu=on_gpu)
    bad: dict[str, BadCut] = {}
    arrivals, audio_s, started = list[float](), list[float](), time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # torch's loader draws a seed from the global generator
        for batch in loader:
            arrivals.append(time.perf_counter())
            audio_s.append(batch.audio.numel() / data.sampling_rate)
            bad_cuts = [*batch.bad_cuts, *(cut for mix in batch.mixes for cut in mix.bad_noise)]
            bad |= {cut.cut_id: cut for cut in bad_cuts}
    rate = sum(audio_s[num_first:]) / (arrivals[-1] - arrivals[num_first - 1])
    value = f"{len(arrivals)} batches read, the first after {arrivals[0] - started:.2f} s"
    figures = {"first_batch_seconds": arrivals[0] - started, "audio_s_per_s": rate, "bad_cuts": float(len(bad))}
    notes: tuple[str, ...] = () if step_rate is None else (loader_note(rate, data.num_workers, step_rate),)
    advice, noise = [], data.noise.corpus
    in_speech, in_noise = share_of_speech(data.train_dataset.corpus), share_of_speech(noise) if noise else None
    if in_speech is not None and in_noise is not None:
        heard = f"speech is heard in {in_speech:.0%} of the speech and in {in_noise:.0%} of the noise"
        notes += (heard,)
        if in_noise > in_speech + _SWAPPED_MARGIN:
            advice.append(f"{heard}: the two may be swapped. Compare data.corpus and data.noise.")
    if bad:
        listed = "; ".join(f"{cut.cut_id} ({cut.reason}): {cut.detail}" for cut in list(bad.values())[:_MAX_SHOWN])
        more = f"; and {len(bad) - _MAX_SHOWN} more" if len(bad) > _MAX_SHOWN else ""
        advice.append(f"unusable audio: {listed}{more}. Prepare the corpus again with --probe decode.")
        value += f", {len(bad)} bad cuts"
    status: Status = "warning" if advice else "ok"
    return CheckResult(status=status, value=value, advice=" ".join(advice), figures=figures, notes=notes)


def loader_note(rate: float, num_workers: int, step_rate: float) -> str:
    """Returns the rates of a loader and of a step as text, and advice if steps clearly wait for the loader.

    Args:
        rate: Seconds of audio that the loader gives in a second.
        num_workers: Number of its processes.
        step_rate: Seconds of audio that a step takes in a second.
    """
    note = f"the loader gives {rate:,.0f} audio-s/s with data.num_workers {num_workers}, a step takes {step_rate:,.0f}"
    return f"{note}: steps wait for it, so raise data.num_workers" if rate < _WAITING_RATIO * step_rate else note


def check_disk(model: NestModel, trainer: pl.Trainer) -> CheckResult:
    """Checks that the checkpoints fit on their disk. Only rank 0 checks, because it writes them."""
    if not trainer.is_global_zero:
        return CheckResult(status="skipped", value="rank 0 writes")
    savers = savers_of(trainer)
    config = savers[0].config if savers else CheckpointConfig(keep=1)
    keep = config.keep + (config.monitor is not None)  # the best one may not be among the newest
    directory = (config.directory or Path(trainer.default_root_dir)).absolute()
    setting = "checkpoints.directory" if config.directory else "--output"
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    each = _BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    # The newest checkpoint is written before the oldest one is removed.
    free, needed = shutil.disk_usage(existing).free, (keep + 1) * each
    value = f"{gigabytes(free)} free, {keep + 1} checkpoints of {gigabytes(each)}"
    figures = {"needed_bytes": float(needed), "free_bytes": float(free), "checkpoint_bytes": float(each)}
    if not os.access(existing, os.W_OK):
        advice = f"{existing} is not writable. Give {setting} a directory that is."
    elif free < needed:
        advice = f"{existing} has no space for {gigabytes(needed)}. Free some, or give another {setting}."
    else:
        return CheckResult(status="ok", value=value, figures=figures)
    return CheckResult(status="failed", value=value, advice=advice, figures=figures)


@contextmanager
def _process_group(trainer: pl.Trainer, timeout_s: float) -> Iterator[None]:
    """Forms the process group of the trainer's strategy, and destroys it at the end."""
    set_process_group_timeout(trainer, timeout_s)
    try:
        trainer.strategy.setup_environment()
    except (RuntimeError, ValueError) as error:
        if trainer.world_size == 1:
            raise
        raise TrainingError(
            f"rank {trainer.global_rank}: the {trainer.world_size} ranks did not connect within {timeout_s:g} s "
            f"({last_error_line(error)}). Start all of them, and check MASTER_ADDR and MASTER_PORT."
        ) from error
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _finish(trainer: pl.Trainer, exchange: StoreExchange) -> None:
    """Waits for all ranks, and for the processes that Lightning's launcher started."""
    # The launcher kills rank 0 as soon as another rank has exited with code 1, so its list is emptied.
    launched = launched_processes(trainer)
    processes = list(launched)
    launched.clear()
    exchange.finish()
    if processes:
        torch.distributed.destroy_process_group()
    for process in processes:
        try:
            process.wait(_LAUNCHED_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
