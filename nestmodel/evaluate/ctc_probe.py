"""Runs the content probe: a small CTC head on frozen features recognises characters.

Source: SUPERB, arXiv:2105.01051: a frozen encoder, a learned weighted sum of its layers, a small head. The head is that
of SUPERB's phoneme recognition, one linear map with CTC; its speech recognition has a BLSTM of two layers. A hidden
layer before the linear map, and single layers of the encoders instead of their sum, can be asked for. Differs:
characters instead of phonemes; each dimension of each layer is standardised; several labels per frame if
frames are longer than 40 ms (those of SUPERB's encoders last 20 ms); the epoch is selected by a part of the training
utterances.

Every contestant has the same texts, split, head, learning rates to choose from, and stopping rule. Features are
computed once and cached on disk. Heads are trained on the CPU.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

from nestdata import AudioInputs, derive_key
from nestmodel.evaluate.contestants import Contestant
from nestmodel.evaluate.ctc_head import (
    StoppingRule,
    TrainedHead,
    default_labels_per_frame,
    fit_head,
    fits,
    transcribe,
)
from nestmodel.evaluate.ctc_report import (
    NUM_EXAMPLES,
    ContestantScore,
    CtcProbeConfig,
    CtcProbeReport,
    Difference,
    Example,
    SeedScore,
    draw_ctc_probe,
    markdown,
)
from nestmodel.evaluate.encode import frame_rate_hz, resolve_device
from nestmodel.evaluate.error_rates import ErrorCounts, check_jiwer, count_errors, error_difference, error_rate
from nestmodel.evaluate.feature_cache import FeatureCache
from nestmodel.evaluate.inputs import OnProgress
from nestmodel.evaluate.probe_output import OnWork, probe_directory, progress_counter
from nestmodel.evaluate.sides import Caches, Side, open_sides, write_caches
from nestmodel.evaluate.text import Alphabet
from nestmodel.evaluate.transcripts import SpeechUtterance, SplitRows, check_enough, interval_name, split_training
from nestmodel.nn.network import NestNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What every contestant is trained and scored on."""

    texts: dict[int, str]
    labels_per_frame: int
    rows: SplitRows
    alphabet: Alphabet
    test: list[SpeechUtterance]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recognition:
    """Test transcripts of one contestant and their errors, by seed."""

    score: ContestantScore
    hypotheses: list[list[str]]
    characters: list[ErrorCounts]
    words: list[ErrorCounts]


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
    config = config or CtcProbeConfig()
    check_jiwer()
    resolve_device(config.device)
    target = None if output is None else Path(output).resolve()
    rate = model.config.features.sampling_rate
    with probe_directory(target, overwrite) as directory:
        with open_sides(
            inputs,
            test,
            rate,
            directory,
            needs_text=True,
            group_by=config.group_by,
            allow_commands=config.allow_commands,
        ) as sides:
            report, hypotheses = _probe_sides(model, *sides, config, directory, on_progress)
            left_out = {"training": sides[0].rejects.counts, "test": sides[1].rejects.counts}
        report = replace(report, model=model_name, left_out=left_out)
        if target is not None:
            draw_ctc_probe(report, directory / "probe.png")
            (directory / "report.md").write_text(markdown(report), encoding="utf-8")
            (directory / "hypotheses.jsonl").write_text(hypotheses, encoding="utf-8")
            content = json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"
            (directory / "probe.json").write_text(content, encoding="utf-8")
    return report


def _probe_sides(
    model: NestNetwork,
    training: Side,
    test: Side,
    config: CtcProbeConfig,
    directory: Path,
    on_progress: OnProgress | None,
) -> tuple[CtcProbeReport, str]:
    """Returns the report without the name of the model and the rejects, and the lines of `hypotheses.jsonl`."""
    labels_per_frame = config.labels_per_frame or default_labels_per_frame(frame_rate_hz(model))
    contestants: list[Contestant] = ["trained", *config.baselines]
    single_layers: list[tuple[Contestant, int]] = [
        (name, layer)
        for name in contestants
        if config.each_layer and name != "log_mel"  # log-mels are one layer, which is scored already
        for layer in range(model.config.encoder.num_layers + 1)
    ]
    num_scored = len(contestants) + len(single_layers)
    num_heads = num_scored * len(config.learning_rates) * len(config.probe_seeds)
    num_encoded = len(contestants) * (len(training.utterances) + len(test.utterances))
    on_work = progress_counter(num_encoded + num_heads * len(training.utterances), on_progress)
    with tempfile.TemporaryDirectory(dir=directory) as cache_directory:
        caches = write_caches(
            model,
            training,
            test,
            Path(cache_directory),
            on_work,
            seed=config.seed,
            max_batch_seconds=config.max_batch_seconds,
            device=config.device,
            contestants=contestants,
        )
        in_all = set.intersection(*(each.training.rows for each in caches.values()))
        in_all_test = set.intersection(*(each.test.rows for each in caches.values()))
        usable = [one for one in training.utterances if one.row in in_all]
        scored = [one for one in test.utterances if one.row in in_all_test]
        writable = [one for one in usable if _fits(one, caches["trained"].training, labels_per_frame)]
        check_enough(len(writable), len(scored))
        task = _Task(
            texts={one.row: one.text for one in writable},
            labels_per_frame=labels_per_frame,
            rows=split_training(writable, config.held_out, config.seed),
            alphabet=Alphabet.of_texts(one.text for one in writable),
            test=scored,
        )
        found = {
            name: _recognise(name, None, caches[name], task, config, on_work, len(training.utterances))
            for name in contestants
        }
        layers = {
            (name, layer): _recognise(name, layer, caches[name], task, config, on_work, len(training.utterances))
            for name, layer in single_layers
        }
        num_fast = sum(not _fits(one, caches["trained"].test, labels_per_frame) for one in scored)
    known_texts = {one.text for one in training.utterances}
    report = CtcProbeReport(
        config=replace(config, labels_per_frame=labels_per_frame),
        model="",
        alphabet=task.alphabet.characters,
        unknown_characters=task.alphabet.count_unknown(one.text for one in scored),
        frame_rate_hz=frame_rate_hz(model),
        num_training=len(task.rows.training),
        num_held_out=len(task.rows.held_out),
        num_test=len(scored),
        intervals_over=interval_name((one.group for one in scored), config.group_by),
        num_too_fast={"training": len(usable) - len(writable), "test": num_fast},
        num_known_texts=sum(one.text in known_texts for one in scored),
        contestants=[one.score for one in found.values()],
        differences=[_difference(found["trained"], found[name], config.seed) for name in config.baselines],
        layers=[one.score for one in layers.values()],
        layer_differences=[
            _difference(one, found["log_mel"] if baseline == "log_mel" else layers[baseline, layer], config.seed)
            for (name, layer), one in layers.items()
            if name == "trained"
            for baseline in config.baselines
        ],
        examples=_examples(task.test, found, config.seed),
    )
    recognitions = {str(name): one for name, one in found.items()}
    recognitions |= {f"{name}_layer_{layer}": one for (name, layer), one in layers.items()}
    return report, _hypothesis_lines(task.test, recognitions, config)


def _recognise(
    name: Contestant,
    layer: int | None,
    caches: Caches,
    task: _Task,
    config: CtcProbeConfig,
    on_work: OnWork,
    num_utterances: int,
) -> _Recognition:
    """Selects the learning rate of a contestant, trains its heads, and counts their errors on the test utterances.

    The heads read a single layer, or all layers if `layer` is None.
    """
    if layer is not None:
        caches = Caches(training=caches.training.layer(layer), test=caches.test.layer(layer))

    def fit(learning_rate: float, seed: int) -> TrainedHead:
        trained = fit_head(
            caches.training,
            task.texts,
            task.alphabet,
            *task.rows,
            labels_per_frame=task.labels_per_frame,
            learning_rate=learning_rate,
            rule=StoppingRule(max_epochs=config.max_epochs, patience=config.patience),
            seed=seed,
            hidden=config.hidden,
        )
        on_work(num_utterances)
        return trained

    # All seeds choose the learning rate: with a low one, some heads write next to nothing, depending on the seed.
    candidates = {rate: [fit(rate, seed) for seed in config.probe_seeds] for rate in config.learning_rates}
    held_out = {rate: fmean(one.error_rate for one in heads) for rate, heads in candidates.items()}
    learning_rate = min(held_out, key=held_out.__getitem__)
    heads = candidates[learning_rate]
    references, test_rows = [one.text for one in task.test], [one.row for one in task.test]
    hypotheses = [transcribe(one.head, caches.test, task.alphabet, test_rows) for one in heads]
    groups = [one.group for one in task.test]
    characters = [count_errors(references, texts, "characters").by_group(groups) for texts in hypotheses]
    words = [count_errors(references, texts, "words").by_group(groups) for texts in hypotheses]
    seeds = zip(config.probe_seeds, heads, characters, words, strict=True)
    score = ContestantScore(
        name=name,
        layer=layer,
        num_parameters=sum(values.numel() for values in heads[0].head.parameters()),
        learning_rate=learning_rate,
        held_out_error_rates=held_out,
        seeds=[_seed_score(*each, config.seed) for each in seeds],
        characters=error_rate(reduce(add, characters), config.seed),
        words=error_rate(reduce(add, words), config.seed),
    )
    return _Recognition(score=score, hypotheses=hypotheses, characters=characters, words=words)


def _seed_score(
    probe_seed: int, trained: TrainedHead, characters: ErrorCounts, words: ErrorCounts, seed: int
) -> SeedScore:
    return SeedScore(
        seed=probe_seed,
        held_out_error_rate=trained.error_rate,
        best_epoch=trained.best_epoch,
        num_epochs=trained.num_epochs,
        num_steps=trained.num_steps,
        layer_weights=trained.head.layer_weights.tolist(),
        characters=error_rate(characters, seed),
        words=error_rate(words, seed),
    )


def _difference(trained: _Recognition, other: _Recognition, seed: int) -> Difference:
    pairs = zip(trained.characters, other.characters, strict=True)
    return Difference(
        baseline=other.score.name,
        layer=trained.score.layer,
        characters=error_difference(reduce(add, trained.characters), reduce(add, other.characters), seed),
        words=error_difference(reduce(add, trained.words), reduce(add, other.words), seed),
        characters_by_seed=[error_difference(one, another, seed) for one, another in pairs],
    )


def _examples(test: list[SpeechUtterance], found: dict[Contestant, _Recognition], seed: int) -> list[Example]:
    drawn = sorted(range(len(test)), key=lambda i: (derive_key(seed, f"probe example/{test[i].cut_id}"), i))
    return [
        Example(
            cut_id=test[i].cut_id,
            reference=test[i].text,
            hypotheses={name: one.hypotheses[0][i] for name, one in found.items()},
        )
        for i in drawn[:NUM_EXAMPLES]
    ]


def _hypothesis_lines(test: list[SpeechUtterance], found: dict[str, _Recognition], config: CtcProbeConfig) -> str:
    """Returns one JSON line per test utterance: its id, group and text, and its transcripts by features and seed."""
    lines = []
    for i, utterance in enumerate(test):
        transcripts: dict[str, Any] = {
            name: {str(seed): texts[i] for seed, texts in zip(config.probe_seeds, one.hypotheses, strict=True)}
            for name, one in found.items()
        }
        line: dict[str, Any] = {"id": utterance.cut_id, "group": utterance.group, "text": utterance.text}
        line |= transcripts
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def _fits(utterance: SpeechUtterance, cache: FeatureCache, labels_per_frame: int) -> bool:
    return fits(utterance.text, cache.num_frames(utterance.row) * labels_per_frame)
