"""Small checks: look-ahead, restarts, disk, shared memory, reading of audio, collectives."""

import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from nestdata import BadCut, microbatches
from nestmodel.preflight.measure.collectives import time_sums
from nestmodel.preflight.measure.loader_speed import on_gpu
from nestmodel.preflight.measure.memory import available_bytes, gigabytes
from nestmodel.preflight.report import CheckResult
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel
from nestmodel.training.saving.checkpoints import Checkpoints

_BYTES_PER_PARAMETER = 12  # a weight and the two moments of AdamW in float32
_MAX_SHOWN = 5


def check_restarts(environment: Mapping[str, str]) -> CheckResult:
    """Checks that ranks restarted by torchrun cannot read outdated addresses from the store of the previous attempt."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return CheckResult(status="skipped", value="not under torchrun")
    max_restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if not max_restarts:
        return CheckResult(status="ok", value="torchrun does not restart")
    value = f"torchrun restarts up to {max_restarts} times"
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return CheckResult(status="ok", value=value)
    advice = (
        "torchrun keeps the store of the previous attempt, so restarted ranks may connect to its outdated addresses "
        "(pytorch#135712). Start it with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )
    return CheckResult(status="warning", value=value, advice=advice)


def describe_look_ahead(model: NestModel) -> CheckResult:
    """Lists look-ahead and delay of each attention context; skipped if attention has no limit."""
    if not model.config.encoder.is_limited:
        return CheckResult(status="skipped", value="attention has no limit")
    return CheckResult(status="ok", value=model.config.describe_contexts())


def check_disk(model: NestModel, trainer: pl.Trainer) -> CheckResult:
    """Checks that the checkpoints fit on their disk. Only rank 0 checks, because it writes them."""
    if not trainer.is_global_zero:
        return CheckResult(status="skipped", value="rank 0 writes")
    callbacks = cast(list[pl.Callback], getattr(trainer, "callbacks", []))
    callback = next((callback for callback in callbacks if isinstance(callback, Checkpoints)), None)
    keep, keep_every = (callback.keep, callback.keep_every_n_steps) if callback else (1, None)
    keep += callback is not None and callback.monitor is not None  # the best one may be none of the newest
    directory = ((callback.directory if callback else None) or Path(trainer.default_root_dir)).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    each = _BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    num_permanent = max(trainer.max_steps, 0) // keep_every if keep_every else 0
    # The newest checkpoint is written before the oldest one is removed.
    free, needed = shutil.disk_usage(existing).free, (keep + 1) * each
    value = f"{gigabytes(free)} free, {keep + 1} checkpoints of {gigabytes(each)}"
    figures = {"needed_bytes": float(needed), "free_bytes": float(free), "checkpoint_bytes": float(each)}
    if not os.access(existing, os.W_OK):
        advice = f"{existing} is not writable. Set trainer.default_root_dir to a directory that is."
    elif free < needed:
        advice = f"{existing} has no space for {gigabytes(needed)}. Free some, or set trainer.default_root_dir."
    elif free < needed + num_permanent * each:
        total = gigabytes(needed + num_permanent * each)
        advice = (
            f"with the checkpoints of keep_every_n_steps, the run needs {total} by its end, more than {existing} has. "
            "Free some space in time."
        )
        return CheckResult(status="warning", value=value, advice=advice, figures=figures)
    else:
        return CheckResult(status="ok", value=value, figures=figures)
    return CheckResult(status="failed", value=value, advice=advice, figures=figures)


def check_shared_memory(data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Checks that the memory that the ranks of a node share with their loader workers is available."""
    if not data.num_workers:
        return CheckResult(status="skipped", value="no loader processes")
    if trainer.local_rank:
        return CheckResult(status="skipped", value="the first rank of the node checks")
    if not (available := available_bytes()):
        return CheckResult(status="skipped", value="the available memory is unknown")
    datasets = [data.train_dataset, *([data.val_dataset] if data.val_dataset else [])]
    each = sum(data.loader_of(dataset, [], on_gpu=on_gpu(trainer)).shared_bytes for dataset in datasets)
    needed = each * local_world_size(trainer)
    num_workers = data.num_workers * local_world_size(trainer)
    value = f"{gigabytes(available)} available, {gigabytes(needed)} for {num_workers} loader processes"
    figures = {"needed_bytes": float(needed), "available_bytes": float(available), "rank_bytes": float(each)}
    if available >= needed:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        "the memory of the node may run out, and the system then ends a process. Lower data.num_workers or "
        "data.plan.max_batch_seconds."
    )
    return CheckResult(status="failed", value=value, advice=advice, figures=figures)


def check_reading(data: NestDataModule, trainer: pl.Trainer, num_batches: int) -> CheckResult:
    """Reads the first batches of this rank with the configured loader workers, from step 0.

    Raises:
        NestError: Audio cannot be read, or the microbatches of a step cannot be divided among the ranks.
    """
    plan = data.train_dataset.plan
    indices = microbatches(plan, rank=trainer.global_rank, world_size=trainer.world_size, num_steps=num_batches)
    loader = data.loader_of(data.train_dataset, indices[:num_batches], on_gpu=on_gpu(trainer))
    bad: dict[str, BadCut] = {}
    seconds, before = [], time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # torch's loader draws a seed from the global generator
        for batch in loader:
            seconds.append(time.perf_counter() - before)
            bad_cuts = [*batch.bad_cuts, *(cut for mix in batch.mixes for cut in mix.bad_noise)]
            bad |= {cut.cut_id: cut for cut in bad_cuts}
            before = time.perf_counter()
    median = statistics.median(seconds[1:] or seconds)
    value = f"{len(seconds)} read, {median:.2f} s a batch, the first {seconds[0]:.2f} s"
    figures = {"seconds_per_batch": median, "first_batch_seconds": seconds[0], "bad_cuts": float(len(bad))}
    if not bad:
        return CheckResult(status="ok", value=value, figures=figures)
    listed = "; ".join(f"{cut.cut_id} ({cut.reason}): {cut.detail}" for cut in list(bad.values())[:_MAX_SHOWN])
    more = f"; and {len(bad) - _MAX_SHOWN} more" if len(bad) > _MAX_SHOWN else ""
    advice = f"unusable audio: {listed}{more}. Prepare the corpus again with --probe decode."
    return CheckResult(status="warning", value=f"{value}, {len(bad)} bad cuts", advice=advice, figures=figures)


def check_collectives(buffers: list[Tensor], timeout_s: float, compute_s: float | None) -> CheckResult:
    """Measures the time of summing a single value, and of summing all gradients, over all ranks.

    All ranks must call it together.

    Args:
        buffers: The buffers of `allocate_buffers`.
        timeout_s: How long a rank waits for one sum, in seconds.
        compute_s: Seconds that this rank computes for one optimizer step; None if unknown.

    Raises:
        TrainingError: A sum was not complete in time.
    """
    small_s, large_s = time_sums(buffers, timeout_s)
    value = f"one value {1000 * small_s:.2f} ms, {buffers[1].numel() / 1e6:.1f} M gradients {1000 * large_s:.1f} ms"
    figures = {"gradients_seconds": large_s, "latency_seconds": small_s}
    if compute_s is None or large_s <= compute_s:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"summing the gradients over ranks takes longer than computing them ({compute_s:.2f} s a step). Check the "
        "network (on GPUs, NCCL_DEBUG=INFO shows the transport), or raise data.plan.max_batch_seconds or "
        "data.plan.microbatches_per_step, so that each rank computes more between two sums."
    )
    return CheckResult(status="warning", value=value, advice=advice, figures=figures)


def local_world_size(trainer: pl.Trainer) -> int:
    """Returns the number of ranks on each node."""
    return max(1, trainer.world_size // trainer.num_nodes)
