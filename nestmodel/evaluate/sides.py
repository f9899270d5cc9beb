"""The training and the test side of a probe that scores on a corpus of its own, and the features of both."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nestdata import AudioInputs, Corpus
from nestmodel.evaluate.contestants import CONTESTANTS, Contestant, contestant_reader
from nestmodel.evaluate.encode import Utterance
from nestmodel.evaluate.feature_cache import FeatureCache
from nestmodel.evaluate.inputs import open_inputs
from nestmodel.evaluate.probe_output import OnWork
from nestmodel.evaluate.rejects import RejectLog
from nestmodel.evaluate.transcripts import SpeechUtterance, check_disjoint, check_enough, speech_utterances
from nestmodel.nn.network import NestNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The training or the test corpus of a probe."""

    corpus: Corpus
    rejects: RejectLog
    utterances: list[SpeechUtterance]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caches:
    """Features of one contestant."""

    training: FeatureCache
    test: FeatureCache


@contextmanager
def open_sides(
    inputs: AudioInputs,
    test: AudioInputs,
    sampling_rate: int,
    directory: Path,
    *,
    needs_text: bool,
    group_by: str | None,
    allow_commands: bool,
) -> Iterator[tuple[Side, Side]]:
    """Yields the training and the test side of a probe, checked to be disjoint; the arguments are of `open_inputs`."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as training_directory,
        tempfile.TemporaryDirectory(dir=directory) as test_directory,
        RejectLog(directory) as rejects,
        RejectLog(directory, "rejected_test.jsonl") as test_rejects,
        open_inputs(inputs, sampling_rate, Path(training_directory), rejects, allow_commands=allow_commands) as corpus,
        open_inputs(
            test, sampling_rate, Path(test_directory), test_rejects, allow_commands=allow_commands
        ) as test_corpus,
    ):
        check_disjoint(corpus, test_corpus)
        found = speech_utterances(corpus, "training", rejects, needs_text=needs_text, group_by=group_by)
        test_found = speech_utterances(test_corpus, "test", test_rejects, needs_text=needs_text, group_by=group_by)
        check_enough(len(found), len(test_found))
        yield (
            Side(corpus=corpus, rejects=rejects, utterances=found),
            Side(corpus=test_corpus, rejects=test_rejects, utterances=test_found),
        )


def write_caches(
    model: NestNetwork,
    training: Side,
    test: Side,
    directory: Path,
    on_work: OnWork,
    *,
    seed: int,
    max_batch_seconds: float,
    device: str,
    contestants: Sequence[Contestant] = CONTESTANTS,
) -> dict[Contestant, Caches]:
    """Computes the features of each contestant; see `contestant_reader`. An utterance may be missing in some."""
    found = {}
    for name in contestants:
        read = contestant_reader(name, model, seed=seed, max_batch_seconds=max_batch_seconds, device=device)
        caches = []
        for number, side in enumerate((training, test)):
            rows = [one.row for one in side.utterances]
            utterances = counted(read(side.corpus, rows, side.rejects.add), on_work)
            caches.append(FeatureCache.write(directory / f"{name}-{number}", utterances))
        found[name] = Caches(training=caches[0], test=caches[1])
    return found


def counted(utterances: Iterator[Utterance], on_work: OnWork) -> Iterator[Utterance]:
    """Yields utterances, and reports each one as a finished unit of work."""
    for utterance in utterances:
        yield utterance
        on_work(1)
