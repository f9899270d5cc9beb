"""The check whether the loader feeds the step: how many workers would feed it, and whether `--pcm` pays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytorch_lightning as pl

from nestmodel.preflight.measure.loader_speed import MARGIN, FeedingMeasurement, measure_feeding
from nestmodel.preflight.measure.memory import gigabytes
from nestmodel.preflight.report import CheckResult, Status
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel

_FED_SHARE = 0.95
"""Share of the speed of the step alone at which loading without workers is good enough."""

_GAIN = 1.05
"""Factor by which `--pcm` must make a run faster to be worth its space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedingAdvice:
    """Advice for one rank, which follows from its measurement."""

    measured: FeedingMeasurement

    wait_share: float
    """Share of the time in which the step waits for the loader, with the configured workers."""

    is_fed: bool
    """Whether the configured workers feed the step."""

    workers_needed: int
    """Workers that feed the step; an extrapolation if it is more than were measured."""

    pcm_delivered: float
    """Estimated rate of the configured workers if all speech were prepared with `--pcm`."""

    pcm_workers_needed: int
    """Estimated number of workers that would feed the step with `--pcm`."""

    pcm_pays: bool
    """Whether `--pcm` would make the run faster, or feed it with fewer workers."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The advice as lines of text."""
        return _rates_note(self.measured), _verdict_note(self), _pcm_note(self), _disk_note(self.measured)


def check_feeding(
    model: NestModel, data: NestDataModule, trainer: pl.Trainer, num_cores: int, measure_s: float
) -> CheckResult:
    """Measures what the loader delivers with different numbers of workers, and what steps take; returns advice.

    Args:
        model: The model of the run; it is not changed.
        data: The data of the run.
        trainer: The trainer, configured as for the run.
        num_cores: Cores of this rank.
        measure_s: How long each number of workers is measured, in seconds.
    """
    measured = measure_feeding(model, data, trainer, num_cores, measure_s)
    delivered, step_rate = measured.delivered, measured.step_rate
    advice = advise(measured)
    value = (
        f"{delivered[data.num_workers]:,.0f} audio-s/s with {data.num_workers} workers, steps take {step_rate:,.0f}; "
        f"{'fed' if advice.is_fed else 'the loader is the bottleneck'}"
    )
    status: Status = "ok" if advice.is_fed else "warning"
    remedy = "" if advice.is_fed else _remedy(advice)
    figures = {
        "wait_share": advice.wait_share,
        "step_audio_s_per_s": step_rate,
        **{f"delivered_{number}_workers": rate for number, rate in delivered.items()},
        "workers_needed": float(advice.workers_needed),
        "num_cores": float(num_cores),
        "decode_s_per_audio_s": measured.decode_s,
        "bank_s_per_audio_s": measured.bank_s,
        "stored_bytes_per_audio_s": measured.stored_bytes,
        "pcm_delivered": advice.pcm_delivered,
        "pcm_workers_needed": float(advice.pcm_workers_needed),
        "pcm_bytes": 3600 * measured.hours_without_bank * measured.bank_bytes,
    }
    return CheckResult(status=status, value=value, advice=remedy, figures=figures, notes=advice.notes)


def _remedy(advice: FeedingAdvice) -> str:
    measured, parts = advice.measured, []
    if advice.workers_needed <= measured.num_cores and advice.workers_needed != measured.num_workers:
        parts.append(f"set data.num_workers to {advice.workers_needed}")
    if advice.pcm_pays:
        parts.append("prepare the speech with --pcm")
    parts = parts or ["give the rank more cores"]
    return f"{', or '.join(parts)}: the loader delivers too little for the step, see the lines of feeding below."


def advise(measured: FeedingMeasurement) -> FeedingAdvice:
    """Returns the advice that follows from a measurement."""
    with_pcm = {number: _with_pcm(measured, number) for number in measured.delivered}
    run_rate = _run_rate(measured.num_workers, measured.delivered[measured.num_workers], measured.step_rate)
    pcm_rate = _run_rate(measured.num_workers, with_pcm[measured.num_workers], measured.step_rate)
    is_fed = _feeds(measured.num_workers, measured.delivered[measured.num_workers], measured.step_rate)
    needed, pcm_needed = (_workers_needed(rates, measured.step_rate) for rates in (measured.delivered, with_pcm))
    pays = not is_fed and measured.hours_without_bank > 0 and (pcm_rate >= _GAIN * run_rate or pcm_needed < needed)
    return FeedingAdvice(
        measured=measured,
        wait_share=1 - run_rate / measured.step_rate,
        is_fed=is_fed,
        workers_needed=needed,
        pcm_delivered=with_pcm[measured.num_workers],
        pcm_workers_needed=pcm_needed,
        pcm_pays=pays,
    )


def _run_rate(num_workers: int, delivered: float, step_rate: float) -> float:
    """Returns the rate of a run, in which loading without workers and steps take turns."""
    return min(delivered, step_rate) if num_workers else 1 / (1 / delivered + 1 / step_rate)


def _feeds(num_workers: int, delivered: float, step_rate: float) -> bool:
    if num_workers:
        return delivered >= MARGIN * step_rate
    return _run_rate(0, delivered, step_rate) >= _FED_SHARE * step_rate


def _workers_needed(delivered: Mapping[int, float], step_rate: float) -> int:
    """Returns the smallest measured number of workers that feeds a step, or an extrapolation from the largest."""
    for number in sorted(delivered):
        if _feeds(number, delivered[number], step_rate):
            return number
    largest = max(delivered)
    per_worker = delivered[largest] / max(1, largest)
    return max(largest + 1, math.ceil(MARGIN * step_rate / per_worker))


def _with_pcm(measured: FeedingMeasurement, num_workers: int) -> float:
    """Estimates the rate of a number of workers if speech is read from 16-bit samples instead of decoded."""
    processes = max(1, num_workers)
    cost_s = processes / measured.delivered[num_workers]
    return processes / max(cost_s - measured.decode_s + measured.bank_s, measured.bank_s)


def _rates_note(measured: FeedingMeasurement) -> str:
    rates = ", ".join(
        f"{rate:,.0f} with {number} worker{'' if number == 1 else 's'}"
        for number, rate in sorted(measured.delivered.items())
    )
    return (
        f"steps take {measured.step_rate:,.0f} audio-s/s; the loader delivers {rates} "
        f"({measured.num_cores} core{'' if measured.num_cores == 1 else 's'} for this rank)"
    )


def _verdict_note(advice: FeedingAdvice) -> str:
    measured, needed = advice.measured, advice.workers_needed
    configured = measured.num_workers
    if advice.is_fed:
        fewer = f"; {needed} would do" if needed < configured else ""
        return f"the loader is not the bottleneck: data.num_workers {configured} feeds the step{fewer}"
    wait = f"with data.num_workers {configured} steps wait {100 * advice.wait_share:.0f} % of the time"
    if not advice.wait_share:
        wait = f"data.num_workers {configured} delivers less than {MARGIN:g} times what steps take"
    enough = "" if needed <= measured.num_cores else f", more than the {measured.num_cores} cores of this rank"
    return f"the loader is the bottleneck: {wait}; about {needed} workers would feed them{enough}"


def _pcm_note(advice: FeedingAdvice) -> str:
    measured, needed = advice.measured, advice.pcm_workers_needed
    if not measured.hours_without_bank:
        return "the speech was prepared with --pcm already"
    space = gigabytes(3600 * measured.hours_without_bank * measured.bank_bytes)
    effect = (
        f"data.num_workers {measured.num_workers} would deliver about {advice.pcm_delivered:,.0f} audio-s/s, "
        f"{needed} worker{'' if needed == 1 else 's'} would feed the steps, and the speech would take {space} more"
    )
    verdict = "is not needed" if advice.is_fed else "would pay" if advice.pcm_pays else "would not pay"
    return f"preparing the speech with --pcm {verdict}: {effect}"


def _disk_note(measured: FeedingMeasurement) -> str:
    stored, bank = (measured.step_rate * each for each in (measured.stored_bytes, measured.bank_bytes))
    return (
        f"steps take {gigabytes(stored)}/s of speech from the disk as it is stored, {gigabytes(bank)}/s with --pcm; "
        "files that were read before may have come from the page cache"
    )
