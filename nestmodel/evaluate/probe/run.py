"""Runs a probe: what all tasks of `nestmodel probe` share.

The inputs are opened, their usable utterances are listed, the task scores the contestants, and the report is written
into a directory that appears when it is complete. A task is a `Probe`: it says which utterances it uses, what is
predicted from their features, and how its report is written. The modules `labels` and `ctc` have one each.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from nestdata import AudioInputs, Corpus, output_directory
from nestdata.output import has_json_kind
from nestmodel.evaluate.features.batch import BatchFunction, resolve_device
from nestmodel.evaluate.features.encode import Utterance, iterate_corpus
from nestmodel.evaluate.features.inputs import OnProgress, open_inputs
from nestmodel.evaluate.features.rejects import RejectLog
from nestmodel.evaluate.probe.contestants import CONTESTANTS, Caches, FeatureCache, frame_features
from nestmodel.evaluate.probe.utterances import ProbeUtterance, SideName, check_disjoint, check_enough
from nestmodel.evaluate.probe_config import Contestant, CtcProbeConfig, ProbeConfig
from nestmodel.nn.network import NestNetwork

Report = TypeVar("Report")
Settings = ProbeConfig | CtcProbeConfig

_REJECTED: dict[SideName, str] = {"training": "rejected.jsonl", "test": "rejected_test.jsonl"}


@runtime_checkable
class Probe(Protocol[Report]):
    """A task: what is predicted from frozen features."""

    @property
    def config(self) -> Settings:
        """The settings of the task."""

    def utterances(self, corpus: Corpus, side: SideName, rejects: RejectLog, /) -> list[ProbeUtterance]:
        """Returns the utterances of a corpus that the task uses; adds unusable ones to `rejects`."""

    def score(self, run: "ProbeRun") -> Report:
        """Trains and scores models on the features of the contestants."""

    def write(self, report: Report, directory: Path) -> None:
        """Writes the report: `probe.json`, `probe.png` and others."""


class Side(NamedTuple):
    """The training or the test corpus of a probe."""

    corpus: Corpus
    rejects: RejectLog
    utterances: list[ProbeUtterance]


class Work:
    """Counts finished units of work, and reports their number and the total."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._done = 0
        self.total = 0
        """Set by the task before its first unit is finished."""

    def finish(self, number: int = 1) -> None:
        """Adds units that were finished since the last call."""
        self._done += number
        if self._on_progress:
            self._on_progress(self._done, self.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRun:
    """What a task is given: the model, the inputs, and where it may write."""

    model: NestNetwork
    model_name: str
    settings: Settings
    sides: dict[SideName, Side]
    directory: Path
    """Directory of the output, or a temporary one."""

    work: Work

    @property
    def left_out(self) -> dict[str, dict[str, int]]:
        """Number of unusable utterances by reason, of each side."""
        return {name: side.rejects.counts for name, side in self.sides.items()}

    def read(self, side: Side, network: NestNetwork, compute: BatchFunction) -> Iterator[Utterance]:
        """Yields features of the utterances of a side, longest first. Each is a unit of work."""
        rows, limits = (
            [utterance.row for utterance in side.utterances],
            (self.settings.max_batch_seconds, self.settings.device),
        )
        for utterance in iterate_corpus(network, side.corpus, compute, *limits, rows=rows, on_reject=side.rejects.add):
            yield utterance
            self.work.finish()

    @contextmanager
    def cached(
        self, training: Side, test: Side, contestants: Sequence[Contestant] = CONTESTANTS
    ) -> Iterator[dict[Contestant, Caches]]:
        """Yields the frames of each contestant, in files of the context. An utterance may be missing in some."""
        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            caches = {}
            for name in contestants:
                network, compute = frame_features(name, self.model, self.settings.seed)
                written = [
                    FeatureCache.write(Path(directory, f"{name}-{number}"), self.read(side, network, compute))
                    for number, side in enumerate((training, test))
                ]
                caches[name] = Caches(*written)
            yield caches


def run_task(
    probe: Probe[Report],
    model: NestNetwork,
    inputs: dict[SideName, AudioInputs],
    output: str | Path | None,
    *,
    overwrite: bool,
    model_name: str,
    on_progress: OnProgress | None,
) -> Report:
    """Runs a task on one corpus or on two; the errors and the other arguments are those of `run_ctc_probe`."""
    resolve_device(probe.config.device)
    rate = model.config.features.sampling_rate
    with ExitStack() as stack:
        directory = stack.enter_context(_directory(output, overwrite))
        opened: dict[SideName, tuple[Corpus, RejectLog]] = {}
        for name, each in inputs.items():
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            rejects = stack.enter_context(RejectLog(directory, _REJECTED[name]))
            corpus = open_inputs(each, rate, temporary, rejects)
            opened[name] = (stack.enter_context(corpus), rejects)
        if "test" in opened:
            check_disjoint(opened["training"][0], opened["test"][0])
        sides = {
            name: Side(corpus, rejects, probe.utterances(corpus, name, rejects))
            for name, (corpus, rejects) in opened.items()
        }
        if "test" in sides:
            check_enough(len(sides["training"].utterances), len(sides["test"].utterances))
        report = probe.score(
            ProbeRun(
                model=model,
                model_name=model_name,
                settings=probe.config,
                sides=sides,
                directory=directory,
                work=Work(on_progress),
            )
        )
        if output is not None:
            probe.write(report, directory)
    return report


@contextmanager
def _directory(output: str | Path | None, overwrite: bool) -> Iterator[Path]:
    """Yields the directory that becomes `output`, or a temporary directory if there is no output."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="nestmodel-probe-") as name:
            yield Path(name)
    else:
        target = Path(output).resolve()
        with output_directory(target, kind="a probe", overwrite=overwrite, may_replace=_is_probe) as partial:
            yield partial


def _is_probe(directory: Path) -> bool:
    return has_json_kind(directory, "probe.json", "probe")
