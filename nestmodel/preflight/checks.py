"""What each rank looks at by itself before an expensive run: its settings, the room on its disks, its audio.

No check knows of the other ranks, but for `compare_facts`, which looks at what all of them have told.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch

from nestdata import BadCut, BatchPlan, microbatches
from nestmodel.preflight.report import CheckResult
from nestmodel.training.checkpoints import Checkpoints
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel
from nestmodel.training.resume import Settings, flatten_settings

SHARED_MEMORY = Path("/dev/shm")
"""Where the loader's processes leave their batches."""

ERROR = "error"
"""Name of the one fact of a rank that could not tell any other."""

_PACKAGES = ("nestdata", "nestguard", "nestmodel")
_BYTES_PER_PARAMETER = 12  # a weight and two moments in float32
_BATCHES_PER_WORKER = 3  # torch's prefetch of two, and the one that is being made
_ARRAYS_PER_BATCH = 3  # clean, noise, noisy
_SHOWN = 5
_ABSENT = "(not there)"


def gigabytes(number: int) -> str:
    """Returns a number of bytes as people read it."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def last_line(error: BaseException) -> str:
    """Returns the message of an error; one of a loader worker arrives with a traceback, which ends with the message."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    name, separator, message = lines[-1].partition(": ")
    return message if separator and name.endswith("Error") and " " not in name else lines[-1]


def run_facts(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> Settings:
    """Returns all that has to be the same on every rank, by name: code, versions, data and settings."""
    val = data.val_dataset
    return {
        **{f"code of {package}": _code_digest(package) for package in _PACKAGES},
        "version of torch": torch.__version__,
        "version of pytorch-lightning": importlib.metadata.version("pytorch-lightning"),
        "version of lhotse": importlib.metadata.version("lhotse"),
        **flatten_settings(model.config, "model.config"),
        **data.settings,
        "data.val_corpus": repr(val.plan.fingerprint if val else None),
        **{f"trainer.{name}": repr(getattr(trainer, name)) for name in ("precision", "gradient_clip_val", "max_steps")},
        "trainer.val_check_interval": repr(trainer.val_check_interval),
    }


def compare_facts(facts: Sequence[Settings]) -> list[CheckResult]:
    """Returns what is to be said of each rank: a rank fails where it differs from most, in doubt from rank 0."""
    names = list(dict.fromkeys(name for one in facts for name in one if name != ERROR))
    usual = {name: Counter(one.get(name, _ABSENT) for one in facts).most_common(1)[0][0] for name in names}
    results = []
    for one in facts:
        if ERROR in one:
            results.append(CheckResult(status="failed", value="not known", advice=one[ERROR]))
            continue
        others = [name for name in names if one.get(name, _ABSENT) != usual[name]]
        if not others:
            plan = one.get("data.plan.fingerprint", _ABSENT).strip("'")[:12]
            results.append(CheckResult(status="ok", value=f"{len(one)} settings, plan {plan}"))
            continue
        told = [f"{name}: {one.get(name, _ABSENT)} here, {usual[name]} elsewhere" for name in others[:_SHOWN]]
        if len(others) > _SHOWN:
            told.append(f"and {len(others) - _SHOWN} more")
        what = "the same flags, files and installed packages"
        advice = f"{'; '.join(told)}. Give every rank {what}."
        results.append(CheckResult(status="failed", value=f"{len(others)} differ", advice=advice))
    return results


def check_restarts(environment: Mapping[str, str]) -> CheckResult:
    """Looks whether torchrun may start the ranks again under addresses of the attempt before."""
    most = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if "TORCHELASTIC_RUN_ID" not in environment:
        return CheckResult(status="skipped", value="not under torchrun")
    if not most:
        return CheckResult(status="ok", value="torchrun does not restart")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return CheckResult(status="ok", value=f"torchrun restarts up to {most} times")
    advice = (
        "torchrun keeps what the ranks of an attempt have told each other, so that those of the next may look for the "
        "wrong addresses (pytorch#135712). Start it with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )
    return CheckResult(status="warning", value=f"torchrun restarts up to {most} times", advice=advice)


def check_disk(model: NestModel, trainer: pl.Trainer) -> CheckResult:
    """Looks whether the checkpoints fit where they go. Rank 0 alone writes them."""
    if not trainer.is_global_zero:
        return CheckResult(status="skipped", value="rank 0 writes")
    callbacks = [
        one for one in cast(list[pl.Callback], getattr(trainer, "callbacks", [])) if isinstance(one, Checkpoints)
    ]
    callback = callbacks[0] if callbacks else None
    keep, keep_every = (callback.keep, callback.keep_every_n_steps) if callback else (1, None)
    directory = (callback.directory if callback else None) or Path(trainer.default_root_dir)
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    each = _BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    kept_for_good = max(trainer.max_steps, 0) // keep_every if keep_every else 0
    free, needed = shutil.disk_usage(place).free, (keep + 1) * each
    value = f"{gigabytes(free)} free, {keep + 1} checkpoints of {gigabytes(each)}"
    figures = {"needed_bytes": float(needed), "free_bytes": float(free), "checkpoint_bytes": float(each)}
    if not os.access(place, os.W_OK):
        advice = f"{place} cannot be written to. Set trainer.default_root_dir to a place that can."
    elif free < needed:
        advice = f"{place} has no room for {gigabytes(needed)}. Make room, or set trainer.default_root_dir elsewhere."
    elif free < needed + kept_for_good * each:
        total = gigabytes(needed + kept_for_good * each)
        advice = f"those of keep_every_n_steps make it {total} in the end, more than {place} has. Make room in time."
        return CheckResult(status="warning", value=value, advice=advice, figures=figures)
    else:
        return CheckResult(status="ok", value=value, figures=figures)
    return CheckResult(status="failed", value=value, advice=advice, figures=figures)


def check_shared_memory(data: NestDataModule, trainer: pl.Trainer) -> CheckResult:
    """Looks whether the batches that the loaders of a node hold fit into its shared memory."""
    if not data.num_workers:
        return CheckResult(status="skipped", value="no loader processes")
    if trainer.local_rank:
        return CheckResult(status="skipped", value="the first rank of the node looks")
    if not SHARED_MEMORY.is_dir():
        return CheckResult(status="skipped", value=f"no {SHARED_MEMORY}")
    datasets = [data.train_dataset, *([data.val_dataset] if data.val_dataset else [])]
    num_workers = data.num_workers * local_world_size(trainer)
    each = [_largest_batch_bytes(dataset.plan) for dataset in datasets]
    needed = num_workers * _BATCHES_PER_WORKER * sum(each)
    free = shutil.disk_usage(SHARED_MEMORY).free
    value = f"{gigabytes(free)} free, {gigabytes(needed)} for {num_workers} loader processes"
    figures = {"needed_bytes": float(needed), "free_bytes": float(free), "batch_bytes": float(each[0])}
    if free >= needed:
        return CheckResult(status="ok", value=value, figures=figures)
    advice = (
        f"{SHARED_MEMORY} may fill up, and loader processes then die of a bus error. Enlarge it (docker: --shm-size), "
        "or lower data.num_workers or data.plan.max_batch_seconds."
    )
    return CheckResult(status="failed", value=value, advice=advice, figures=figures)


def check_reading(data: NestDataModule, trainer: pl.Trainer, num_batches: int) -> CheckResult:
    """Reads the first batches of this rank as training will, from step 0 on.

    Raises:
        NestDataError: Audio cannot be read, or the ranks cannot share a step.
    """
    plan = data.train_dataset.plan
    places = microbatches(plan, rank=trainer.global_rank, world_size=trainer.world_size, num_steps=num_batches)
    on_gpu = trainer.strategy.root_device.type == "cuda"
    loader = data.train_dataset.loader(places[:num_batches], num_workers=data.num_workers, pin_memory=on_gpu)
    bad: dict[str, BadCut] = {}
    seconds, before = [], time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # from which torch's loader takes a number
        for batch in loader:
            seconds.append(time.perf_counter() - before)
            unusable = [*batch.bad_cuts, *(cut for mix in batch.mixes for cut in mix.bad_noise)]
            bad |= {cut.cut_id: cut for cut in unusable}
            before = time.perf_counter()
    median = statistics.median(seconds[1:] or seconds)
    value = f"{len(seconds)} read, {median:.2f} s a batch, the first {seconds[0]:.2f} s"
    figures = {"seconds_per_batch": median, "first_batch_seconds": seconds[0], "bad_cuts": float(len(bad))}
    if not bad:
        return CheckResult(status="ok", value=value, figures=figures)
    named = "; ".join(f"{cut.cut_id} ({cut.reason}): {cut.detail}" for cut in list(bad.values())[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    advice = f"audio that cannot be used: {named}{more}. Prepare the corpus again with --probe decode."
    return CheckResult(status="warning", value=f"{value}, {len(bad)} bad cuts", advice=advice, figures=figures)


def local_world_size(trainer: pl.Trainer) -> int:
    """Returns how many ranks share a node."""
    return max(1, trainer.world_size // trainer.num_nodes)


def _largest_batch_bytes(plan: BatchPlan) -> int:
    largest = max(bucket.padded_samples * bucket.cuts_per_microbatch for bucket in plan.buckets)
    return _ARRAYS_PER_BATCH * torch.float32.itemsize * largest


def _code_digest(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    digest = hashlib.blake2b(digest_size=6)
    for root in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
