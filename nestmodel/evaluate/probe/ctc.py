"""Runs the content probe: a small CTC head on frozen features recognises characters.

Source: SUPERB, arXiv:2105.01051: a frozen encoder, a learned weighted sum of its layers, a small head. The head is that
of SUPERB's phoneme recognition, one linear map with CTC; its speech recognition has a BLSTM of two layers. Differs:
characters instead of phonemes; each dimension of each layer is standardised; several labels per frame if frames are
longer than 40 ms (those of SUPERB's encoders last 20 ms); the epoch is selected by a part of the training utterances.

Every contestant has the same texts, split, head, learning rates to choose from, and stopping rule. Features are
computed once and cached on disk. Heads are trained on the CPU.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

from nestdata import AudioInputs, Corpus, derive_key
from nestmodel.evaluate.error_rates import ErrorCounts, check_jiwer, count_errors, error_difference, error_rate
from nestmodel.evaluate.features.batch import frame_rate_hz
from nestmodel.evaluate.features.inputs import OnProgress
from nestmodel.evaluate.features.rejects import RejectLog
from nestmodel.evaluate.probe.contestants import Caches
from nestmodel.evaluate.probe.ctc_head import (
    HeadTask,
    TrainedHead,
    default_labels_per_frame,
    fit_head,
    transcribe,
    writable,
)
from nestmodel.evaluate.probe.ctc_markdown import markdown
from nestmodel.evaluate.probe.ctc_report import (
    NUM_EXAMPLES,
    ContestantScore,
    CtcProbeReport,
    Difference,
    Example,
    SeedScore,
    draw_ctc_probe,
)
from nestmodel.evaluate.probe.run import ProbeRun, run_task
from nestmodel.evaluate.probe.training import StoppingRule
from nestmodel.evaluate.probe.utterances import (
    ProbeUtterance,
    SideName,
    check_enough,
    in_all,
    interval_name,
    speech_utterances,
)
from nestmodel.evaluate.probe_config import Contestant, CtcProbeConfig
from nestmodel.nn.network import NestNetwork


def run_ctc_probe(
    model: NestNetwork,
    inputs: AudioInputs,
    test: AudioInputs,
    config: CtcProbeConfig | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> CtcProbeReport:
    """Compares how well characters are recognised from a trained encoder, an untrained encoder and log-mels.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: Transcribed utterances for training; a corpus, or any inputs that `nestdata prepare` reads.
        test: Transcribed utterances that are scored, of other recordings.
        config: How the heads are trained.
        output: Directory for `probe.json`, `report.md`, `probe.png`, `hypotheses.jsonl`, `rejected.jsonl` and
            `rejected_test.jsonl`; None writes nothing.
        overwrite: Whether an earlier probe at `output` is replaced.
        model_name: Name of the model in the report.
        on_progress: Called with the finished and the total units of work: an utterance that is encoded once, or on
            which one head is trained.

    Raises:
        ConfigError: The device does not exist, a corpus has another sampling rate than the model, or jiwer is not
            installed.
        ProbeError: There are too few utterances with text, they cannot be split, or both sides have the same audio.
        ExtractError: A batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: An input cannot be read.
    """
    check_jiwer()
    probe = CtcProbe(config or CtcProbeConfig())
    sides: dict[SideName, AudioInputs] = {"training": inputs, "test": test}
    return run_task(probe, model, sides, output, overwrite=overwrite, model_name=model_name, on_progress=on_progress)


@dataclass(frozen=True, slots=True)
class CtcProbe:
    """The task `ctc`: characters of utterances."""

    config: CtcProbeConfig

    def utterances(self, corpus: Corpus, side: SideName, rejects: RejectLog) -> list[ProbeUtterance]:
        """Returns the utterances with text."""
        return speech_utterances(corpus, side, rejects, needs_text=True, group_by=self.config.group_by)

    def score(self, run: ProbeRun) -> CtcProbeReport:
        """Trains heads on the features of each contestant; writes `hypotheses.jsonl`."""
        config, model = self.config, run.model
        training, test = run.sides["training"], run.sides["test"]
        labels_per_frame = config.labels_per_frame or default_labels_per_frame(frame_rate_hz(model))
        contestants: list[Contestant] = ["trained", *config.baselines]
        num_heads = len(contestants) * len(config.learning_rates) * len(config.probe_seeds)
        num_encoded = len(contestants) * (len(training.utterances) + len(test.utterances))
        run.work.total = num_encoded + num_heads * len(training.utterances)
        with run.cached(training, test, contestants) as caches:
            usable = in_all(training.utterances, [each.training for each in caches.values()])
            scored = in_all(test.utterances, [each.test for each in caches.values()])
            learned = writable(usable, caches["trained"].training, labels_per_frame)
            num_fast = len(scored) - len(writable(scored, caches["trained"].test, labels_per_frame))
            check_enough(len(learned), len(scored))
            heads = HeadTask.of(learned, labels_per_frame=labels_per_frame, held_out=config.held_out, seed=config.seed)
            contest = _Contest(run=run, config=config, heads=heads, test=scored)
            found = {name: contest.recognise(name, caches[name]) for name in contestants}
        lines = _hypothesis_lines(scored, found, config)
        (run.directory / "hypotheses.jsonl").write_text(lines, encoding="utf-8")
        known_texts = {utterance.target for utterance in training.utterances}
        return CtcProbeReport(
            config=replace(config, labels_per_frame=labels_per_frame),
            model=run.model_name,
            alphabet=heads.alphabet.characters,
            unknown_characters=heads.alphabet.count_unknown(utterance.target for utterance in scored),
            frame_rate_hz=frame_rate_hz(model),
            num_training=len(heads.rows.training),
            num_held_out=len(heads.rows.held_out),
            num_test=len(scored),
            intervals_over=interval_name((utterance.group for utterance in scored), config.group_by),
            num_too_fast={"training": len(usable) - len(learned), "test": num_fast},
            num_known_texts=sum(utterance.target in known_texts for utterance in scored),
            contestants=[recognition.score for recognition in found.values()],
            differences=[_difference(found["trained"], found[name], config.seed) for name in config.baselines],
            examples=_examples(scored, found, config.seed),
            left_out=run.left_out,
        )

    def write(self, report: CtcProbeReport, directory: Path) -> None:
        """Writes the report as text, as data and as a picture."""
        draw_ctc_probe(report, directory / "probe.png")
        (directory / "report.md").write_text(markdown(report), encoding="utf-8")
        content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"
        (directory / "probe.json").write_text(content, encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recognition:
    """Test transcripts of one contestant and their errors, by seed."""

    score: ContestantScore
    hypotheses: list[list[str]]
    characters: list[ErrorCounts]
    words: list[ErrorCounts]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contest:
    """What every contestant is trained and scored on."""

    run: ProbeRun
    config: CtcProbeConfig
    heads: HeadTask
    test: list[ProbeUtterance]

    def recognise(self, name: Contestant, caches: Caches) -> _Recognition:
        """Chooses the learning rate of a contestant, trains its heads, and counts their errors on the test corpus."""
        config = self.config
        # All seeds choose the learning rate: with a low one, some heads write next to nothing, depending on the seed.
        candidates = {
            rate: [self._fit(caches, rate, seed) for seed in config.probe_seeds] for rate in config.learning_rates
        }
        held_out = {rate: fmean(head.training.held_out_error for head in heads) for rate, heads in candidates.items()}
        learning_rate = min(held_out, key=held_out.__getitem__)
        heads, rows = candidates[learning_rate], [utterance.row for utterance in self.test]
        hypotheses = [transcribe(trained.head, caches.test, self.heads.alphabet, rows) for trained in heads]
        references, groups = [utterance.target for utterance in self.test], [utterance.group for utterance in self.test]
        characters = [count_errors(references, texts, "characters").by_group(groups) for texts in hypotheses]
        words = [count_errors(references, texts, "words").by_group(groups) for texts in hypotheses]
        seeds = zip(config.probe_seeds, heads, characters, words, strict=True)
        score = ContestantScore(
            name=name,
            num_parameters=sum(values.numel() for values in heads[0].head.parameters()),
            learning_rate=learning_rate,
            held_out_error_rates=held_out,
            seeds=[_seed_score(*each, config.seed) for each in seeds],
            characters=error_rate(reduce(add, characters), config.seed),
            words=error_rate(reduce(add, words), config.seed),
        )
        return _Recognition(score=score, hypotheses=hypotheses, characters=characters, words=words)

    def _fit(self, caches: Caches, learning_rate: float, seed: int) -> TrainedHead:
        rule = StoppingRule(max_epochs=self.config.max_epochs, patience=self.config.patience)
        trained = fit_head(caches.training, self.heads, learning_rate=learning_rate, rule=rule, seed=seed)
        self.run.work.finish(len(self.run.sides["training"].utterances))
        return trained


def _seed_score(
    probe_seed: int, trained: TrainedHead, characters: ErrorCounts, words: ErrorCounts, seed: int
) -> SeedScore:
    return SeedScore(
        seed=probe_seed,
        held_out_error_rate=trained.training.held_out_error,
        best_epoch=trained.training.best_epoch,
        num_epochs=trained.training.num_epochs,
        num_steps=trained.training.num_steps,
        layer_weights=trained.head.layer_weights.tolist(),
        characters=error_rate(characters, seed),
        words=error_rate(words, seed),
    )


def _difference(trained: _Recognition, other: _Recognition, seed: int) -> Difference:
    pairs = zip(trained.characters, other.characters, strict=True)
    return Difference(
        baseline=other.score.name,
        characters=error_difference(reduce(add, trained.characters), reduce(add, other.characters), seed),
        words=error_difference(reduce(add, trained.words), reduce(add, other.words), seed),
        characters_by_seed=[error_difference(one, another, seed) for one, another in pairs],
    )


def _examples(test: Sequence[ProbeUtterance], found: dict[Contestant, _Recognition], seed: int) -> list[Example]:
    drawn = sorted(range(len(test)), key=lambda i: (derive_key(seed, f"probe example/{test[i].cut_id}"), i))
    return [
        Example(
            cut_id=test[i].cut_id,
            reference=test[i].target,
            hypotheses={name: recognition.hypotheses[0][i] for name, recognition in found.items()},
        )
        for i in drawn[:NUM_EXAMPLES]
    ]


def _hypothesis_lines(
    test: Sequence[ProbeUtterance], found: dict[Contestant, _Recognition], config: CtcProbeConfig
) -> str:
    """Returns one JSON line per test utterance: its id, group and text, and its transcripts by features and seed."""
    lines = []
    for i, utterance in enumerate(test):
        transcripts: dict[str, Any] = {
            name: {str(seed): texts[i] for seed, texts in zip(config.probe_seeds, recognition.hypotheses, strict=True)}
            for name, recognition in found.items()
        }
        line: dict[str, Any] = {"id": utterance.cut_id, "group": utterance.group, "text": utterance.target}
        line |= transcripts
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
