"""The check of object stores: their speed from this node, the requests of a run, and whether they feed its steps."""

from typing import cast

import pytorch_lightning as pl

from nestdata import Storage, StorageConfig
from nestmodel.preflight.measure.loader_speed import MARGIN
from nestmodel.preflight.measure.memory import gigabytes
from nestmodel.preflight.measure.store_speed import AT_ONCE, RequestRate, measure_requests, remote_members
from nestmodel.preflight.report import CheckResult, Status
from nestmodel.preflight.stores.use import StoreUse, noise_use, rounded, speech_use
from nestmodel.training.callbacks.stall_guard import StallGuard
from nestmodel.training.data import NestDataModule

_PATIENCE_S = 20.0
"""Seconds for which a request is retried."""

_LAST_TRY_S = 30.0
"""Time that the last try of a loader may take after its patience has ended, in seconds."""


def check_object_store(
    data: NestDataModule, trainer: pl.Trainer, measure_s: float, step_rate: float | None
) -> CheckResult:
    """Measures the store of the speech, and counts what a run takes from it.

    All ranks of a node measure at the same time, as they read at the same time in a run.

    Args:
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        measure_s: Duration of each of the two measurements, in seconds; 0 leaves them out.
        step_rate: Seconds of audio that steps of this rank take in a second; None if unknown.

    Raises:
        StorageError: The store does not deliver a member.
    """
    dataset = data.train_dataset
    speech = speech_use(dataset.corpus, dataset.plan)
    noise = noise_use(data.noise.corpus, data.config.mix, dataset.plan, dataset.corpus)
    if not speech.requests and not noise.requests:
        return CheckResult(status="skipped", value="all audio is local")
    epoch = speech + noise
    figures = {"requests_per_epoch": epoch.requests, "bytes_per_epoch": epoch.num_bytes}
    notes = _use_notes(speech, noise, _num_epochs(data, trainer))
    warnings = [*_noise_warning(noise), *_patience_warning(data, trainer)]
    value = "not measured"
    if measure_s and speech.requests:
        single, many = _measure(data, trainer, measure_s)
        value = (
            f"{1000 * single.median_s:.0f} ms a request, {AT_ONCE} at once {many.requests_per_s:,.0f} requests/s, "
            f"{gigabytes(many.bytes_per_s)}/s"
        )
        notes = [_speed_note(single, many), *notes, *_feeding_note(many, step_rate)]
        warnings += _feeding_warning(many, step_rate)
        figures = {"latency_seconds": single.median_s, **figures, **_figures(single, many)}
    status: Status = "warning" if warnings else "ok"
    return CheckResult(status=status, value=value, advice=" ".join(warnings), figures=figures, notes=tuple(notes))


def _measure(data: NestDataModule, trainer: pl.Trainer, measure_s: float) -> tuple[RequestRate, RequestRate]:
    storage = Storage(StorageConfig(patience_s=_PATIENCE_S, max_requests=AT_ONCE))
    members = remote_members(data.train_dataset.corpus, trainer.global_rank)
    return (
        measure_requests(members, storage, 1, measure_s),
        measure_requests(members, storage, AT_ONCE, measure_s),
    )


def _figures(single: RequestRate, many: RequestRate) -> dict[str, float]:
    return {
        "p95_latency_seconds": single.p95_s,
        "bytes_per_s": single.bytes_per_s,
        f"latency_seconds_{AT_ONCE}_at_once": many.median_s,
        f"requests_per_s_{AT_ONCE}_at_once": many.requests_per_s,
        f"bytes_per_s_{AT_ONCE}_at_once": many.bytes_per_s,
        f"audio_s_per_s_{AT_ONCE}_at_once": many.audio_s_per_s,
    }


def _num_epochs(data: NestDataModule, trainer: pl.Trainer) -> float | None:
    """Returns the length of the run in epochs of the plan; None if it has no limit in steps or epochs."""
    num_steps = data.train_dataset.plan.steps_per_epoch
    limits = []
    if trainer.max_steps > 0:
        limits.append(trainer.max_steps / num_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limit = trainer.limit_train_batches  # in steps, or a share of an epoch
        share = limit if isinstance(limit, float) else limit / num_steps
        limits.append(trainer.max_epochs * min(1.0, share))
    return min(limits, default=None)  # Lightning ends at the first limit that is reached


def _use_notes(speech: StoreUse, noise: StoreUse, num_epochs: float | None) -> list[str]:
    notes = [f"an epoch takes {speech.text()} for speech"]
    if noise.requests:
        notes[0] += f", and {noise.text()} for noise"
    if num_epochs is not None:
        epochs = "epoch" if num_epochs == 1 else "epochs"
        total = (speech + noise) * num_epochs
        notes.append(f"the run of {rounded(num_epochs, 3)} {epochs} takes {total.text()}, on all ranks together")
    return notes


def _speed_note(single: RequestRate, many: RequestRate) -> str:
    return (
        f"one request at a time takes {1000 * single.median_s:.1f} ms (median; 95 % within "
        f"{1000 * single.p95_s:.1f} ms), {gigabytes(single.bytes_per_s)}/s; {AT_ONCE} at once take "
        f"{1000 * many.median_s:.1f} ms (95 % within {1000 * many.p95_s:.1f} ms), {many.requests_per_s:,.0f} "
        f"requests/s, {gigabytes(many.bytes_per_s)}/s"
    )


def _feeding_note(many: RequestRate, step_rate: float | None) -> list[str]:
    allowed = f"the store delivers up to {many.audio_s_per_s:,.0f} audio-s/s to this rank"
    if step_rate is None:
        return [allowed]
    verdict = "enough" if many.audio_s_per_s >= MARGIN * step_rate else "the store is the bottleneck"
    return [f"{allowed}, steps take {step_rate:,.0f}: {verdict}"]


def _feeding_warning(many: RequestRate, step_rate: float | None) -> list[str]:
    if step_rate is None or many.audio_s_per_s >= MARGIN * step_rate:
        return []
    return [
        f"the store delivers {many.audio_s_per_s:,.0f} audio-s/s, less than {MARGIN:g} times what steps take. Run "
        "nearer to it, keep a share of the corpus on a local disk with data.remote.cache_dir, or write smaller "
        "members with `nestdata pack`."
    ]


def _noise_warning(noise: StoreUse) -> list[str]:
    if not noise.requests:
        return []
    return ["each cut that receives noise waits for a request of its own. Prepare the noise with --pcm."]


def _patience_warning(data: NestDataModule, trainer: pl.Trainer) -> list[str]:
    callbacks = cast(list[pl.Callback], getattr(trainer, "callbacks", []))
    guard = next((callback for callback in callbacks if isinstance(callback, StallGuard) and callback.enabled), None)
    patience_s = data.config.remote.patience_s
    if guard is None or patience_s + _LAST_TRY_S <= guard.limits.step_s:
        return []
    return [
        f"data.remote.patience_s ({patience_s:g}) is not {_LAST_TRY_S:g} s below guard.limits.step_s "
        f"({guard.limits.step_s:g}): the stall guard would end the run while the loader still waits for the store. "
        "Lower the former or raise the latter."
    ]
