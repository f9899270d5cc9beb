"""Shows where the content of frozen encoders is, and for whose speech: voices, languages, layers, heads, units.

    python -m benchmarks run where OUTPUT --data Czech=cs,train.json,test.json --data Dutch=nl,train.json,test.json \
        --purpose choices --model "20 minutes/0=a.ckpt" --model "20 minutes/1=b.ckpt"

A `--data` is a language: its name, the voice of espeak-ng that writes its texts in phones (nothing: no phones), and
NeMo lines with `text`, `speaker` and `scene` for training and for the test. Heads are trained on sets of lines that
differ in their voices and last equally long in all languages: as long as the rarer one of the two main voices of any
language. All heads of a language are scored on the same test lines, whose errors are then counted by voice. Besides,
the labels probe reads voice and scene from each layer, with the lines of all voices.

Models are encoders of one architecture, so that the untrained one is the same for all and is scored once. Names such
as `a/0` and `a/1` are one variant with two seeds, whose errors are added up. Models have letters, and jobs a drawn
order, until the figures are written to figures.md, whose SHA-256 is printed. A run that was interrupted goes on where
it ended. `--quick` checks that everything runs.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.report import machine, table_text, versions
from benchmarks.harness.repository import commit_line
from benchmarks.learning.parts import blind, phones
from benchmarks.learning.parts.manifests import PURPOSES, Line, read_lines, read_manifest, write_lines
from benchmarks.learning.parts.probes import accuracy, errors_of, probes_parser, read_probe, run_probe
from nestmodel import ErrorCounts, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent, ratio_difference

QUICK = None
GROUP, VOICE = "scene", "speaker"
HIDDEN = 256
QUICK_HEADS = "--max-epochs 1 --learning-rates 0.05 --probe-seeds 0"
QUICK_HOURS = 0.02
MAX_SECONDS = 3600.0  # a header without the length of its audio gives a huge one
KINDS = {"characters": "", "hidden": f"--hidden {HIDDEN}", "phones": ""}
SHOWN_KINDS = {"characters": "characters, linear", "hidden": f"characters, hidden {HIDDEN}", "phones": "phones, linear"}
LABELS = {VOICE: "--held-out-where side=test", GROUP: ""}


Variants = Mapping[str, Sequence[str]]
"""Letters of the models of each variant, whose errors are added up."""


class Row(NamedTuple):
    """A condition: which test lines are scored with the heads of which training sets."""

    training: str
    test: str
    parts: list[tuple[str, frozenset[str]]]
    """Training sets, and the voices whose test lines are counted."""


class Data(NamedTuple):
    """A language."""

    name: str
    espeak_voice: str
    train: Path
    test: Path


class Job(NamedTuple):
    """One probe of one model."""

    language: str
    training_set: str
    kind: str
    letter: str

    @property
    def slug(self) -> str:
        """Name of the directory of the probe."""
        return "-".join(self)


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if len(set(blind.first_alike(arguments.models).values())) > 1:
        raise SystemExit("the models have different encoders: compare them in calls of their own.")
    kept = {name: getattr(arguments, name) for name in ("probe_options", "purpose", "quick")}
    data = json.dumps([[str(part) for part in one] for one in arguments.data])
    keep_settings(output, {**kept, "data": data, "models": blind.digests_of(arguments.models)})
    letters = blind.hide_names(output, arguments.models)
    rows, descriptions = prepare(arguments.data, output, arguments.quick)
    jobs = list_jobs(rows, arguments.data, sorted(letters.values()))
    blind.run_drawn(output, {job.slug: partial(_score, output, job, arguments) for job in jobs}, arguments.at_once)
    variants: dict[str, list[str]] = {}
    for name, letter in letters.items():  # in the order of the command
        variants.setdefault(blind.variant_and_seed(name)[0], []).append(letter)
    blind.publish(
        output,
        arguments.results,
        partial(tables, output, rows, arguments.data),
        hidden={letter: [letter] for letter in sorted(letters.values())},
        named=variants,
        head=partial(_head, arguments, list(letters), descriptions),
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = probes_parser(__doc__, results="where.md")
    parser.add_argument("--data", action="append", required=True, type=_data, metavar="NAME=VOICE,TRAIN,TEST")
    blind.add_models(parser)
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="probes at the same time")
    arguments = parser.parse_args()
    arguments.models = blind.named_models(parser, arguments.model)
    return arguments


def _data(text: str) -> Data:
    name, _, rest = text.partition("=")
    parts = rest.split(",")
    if not name.isalnum() or len(parts) != len(Data._fields) - 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VOICE,TRAIN,TEST, a name of letters and digits")
    return Data(name, parts[0], Path(parts[1]), Path(parts[2]))


def prepare(data: Sequence[Data], output: Path, quick: bool) -> tuple[dict[str, list[Row]], list[str]]:
    """Writes the manifests of all training sets, test lines and labels.

    Args:
        data: The languages.
        output: Receives a manifest for each set, with the texts in characters and in phones.
        quick: Whether sets and test lines are short, instead of sets as long as the rarer main voice of all languages.

    Returns:
        The conditions by language, and sentences about the lines.
    """
    lines = {one.name: (read_timed(one.train), read_timed(one.test)) for one in data}
    mains = {name: main_voices(train) for name, (train, _) in lines.items()}
    hours = min(length(of_voices(lines[name][0], {v})) for name, voices in mains.items() for v in voices)
    hours = QUICK_HOURS if quick else hours
    rows, descriptions = {}, []
    for one in data:
        train, test = lines[one.name]
        test = draw(test, hours) if quick else test
        rows[one.name] = conditions(train, test, mains[one.name])
        sets = {part: draw(of_voices(train, voices), hours) for part, voices in training_sets(train, mains[one.name])}
        sets["test"] = test
        for part, chosen in sets.items():
            write_lines(output / f"{one.name}-{part}-characters.json", chosen)
        if one.espeak_voice:
            in_phones, num_phones = phones.in_phones(list(sets.values()), one.espeak_voice)
            for part, chosen in zip(sets, in_phones, strict=True):
                write_lines(output / f"{one.name}-{part}-phones.json", chosen)
        sides = {"train": next(iter(sets.values())), "test": test}
        labelled = [{**line, "side": side} for side, chosen in sides.items() for line in chosen]
        write_lines(output / f"{one.name}-labels.json", labelled)
        voices = spoken(train)
        share = sum(voices[voice] for voice in mains[one.name]) / sum(voices.values())
        descriptions.append(
            f"{one.name}: {len(train)} lines for training ({length(train):.2f} h, {len(voices)} voices, of which "
            f"{' and '.join(mains[one.name])} speak {share:.0%}), of which each training set has {hours:.2f} h; "
            f"{len(test)} test lines ({length(test):.2f} h, {len({line[GROUP] for line in test})} scenes)."
            + (f" Its texts have {num_phones} different phones." if one.espeak_voice else "")
        )
    return rows, descriptions


def read_timed(path: Path) -> list[Line]:
    """Returns the lines of a manifest with their durations, without files whose header does not tell the length."""
    lines = read_manifest(path)
    for line in lines:
        line["duration"] = soundfile.info(line["audio_filepath"]).duration
    return [line for line in lines if line["duration"] < MAX_SECONDS]


def spoken(lines: Sequence[Line]) -> Counter[str]:
    """Returns how long each voice speaks, in seconds."""
    voices = Counter[str]()
    for line in lines:
        voices[line[VOICE]] += line["duration"]
    return voices


def main_voices(lines: Sequence[Line]) -> tuple[str, str]:
    """Returns the two voices that speak longest."""
    voices = spoken(lines)
    if len(voices) < 2:
        raise SystemExit(f"the lines have {len(voices)} voices in the field {VOICE!r}: two are needed.")
    (one, _), (other, _) = voices.most_common(2)
    return one, other


def of_voices(lines: Sequence[Line], voices: frozenset[str] | set[str]) -> list[Line]:
    """Returns the lines of some voices."""
    return [line for line in lines if line[VOICE] in voices]


def length(lines: Sequence[Line]) -> float:
    """Returns the length of lines in hours."""
    return float(sum(line["duration"] for line in lines)) / 3600


def draw(lines: Sequence[Line], hours: float) -> list[Line]:
    """Returns lines of about a number of hours, the first ones by a hash of their audio paths."""
    drawn: list[Line] = []
    for line in sorted(lines, key=lambda line: hashlib.sha256(Path(line["audio_filepath"]).name.encode()).digest()):
        if length(drawn) < hours:
            drawn.append(line)
    return drawn


def training_sets(train: Sequence[Line], mains: tuple[str, str]) -> list[tuple[str, frozenset[str]]]:
    """Returns the names of the training sets and their voices. `all` is left out if there are two voices only."""
    voices = frozenset(line[VOICE] for line in train)
    of_all = [("all", voices)] if len(voices) > len(mains) else []
    return [*of_all, ("two", frozenset(mains)), *((f"one-{n}", frozenset({mains[n]})) for n in range(2))]


def conditions(train: Sequence[Line], test: Sequence[Line], mains: tuple[str, str]) -> list[Row]:
    """Returns the conditions for which there are lines."""
    one, other = (frozenset({voice}) for voice in mains)
    both, everyone = one | other, frozenset(line[VOICE] for line in test)
    unseen = everyone - {line[VOICE] for line in train}
    found = [
        Row("all voices", "all voices", [("all", everyone)]),
        Row("all voices", "the two main voices", [("all", both)]),
        Row("two voices", "the same two", [("two", both)]),
        Row("all voices", "the other voices", [("all", everyone - both)]),
        Row("two voices", "the other voices", [("two", everyone - both)]),
        Row("all voices", "voices of no training line", [("all", unseen)]),
        Row("one voice", "the same", [("one-0", one), ("one-1", other)]),
        Row("one voice", "the other of the two", [("one-0", other), ("one-1", one)]),
    ]
    sets = {name for name, _ in training_sets(train, mains)}
    return [row for row in found if all(part in sets and voices & everyone for part, voices in row.parts)]


def list_jobs(rows: dict[str, list[Row]], data: Sequence[Data], letters: Sequence[str]) -> list[Job]:
    """Returns the probes: all kinds of heads for sets of several voices, and the plain one for single voices."""
    jobs = []
    for one in data:
        sets = dict.fromkeys(part for row in rows[one.name] for part, _ in row.parts)
        for letter in letters:
            jobs += [
                Job(one.name, part, kind, letter)
                for part in sets
                for kind in _kinds(one, is_single=part.startswith("one-"))
            ]
            jobs += [Job(one.name, "labels", label, letter) for label in LABELS]
    return jobs


def _kinds(data: Data, *, is_single: bool) -> list[str]:
    """Returns the kinds of heads that learn from the lines of single voices or of several."""
    return ["characters"] if is_single else [kind for kind in KINDS if kind != "phones" or data.espeak_voice]


def _score(output: Path, job: Job, arguments: argparse.Namespace) -> None:
    if job.training_set == "labels":
        task = f"{job.language}-labels.json --label {job.kind} {LABELS[job.kind]}"
    else:
        units = "phones" if job.kind == "phones" else "characters"
        # From the layers, heads learn with the lines of the most voices only.
        largest = "all" if (output / f"{job.language}-all-characters.json").exists() else "two"
        layers = "--each-layer" if job.kind == "characters" and job.training_set == largest else ""
        baselines = "" if job.letter == blind.LETTERS[0] else "--baselines none"
        task = (
            f"{job.language}-{job.training_set}-{units}.json --test {job.language}-test-{units}.json --task ctc "
            f"--group-by {GROUP} {KINDS[job.kind]} {layers} {baselines} "
            f"{QUICK_HEADS if arguments.quick else ''} {arguments.probe_options}"
        )
    run_probe(output, job.slug, f"{job.letter}.ckpt {task}")


class Counts(NamedTuple):
    """Errors of the same lines with three kinds of features, by scene; of all models of a variant together."""

    trained: ErrorCounts
    untrained: ErrorCounts
    log_mel: ErrorCounts


def counts_of(
    output: Path, language: str, row: Row, kind: str, letters: Sequence[str], layer: int | None = None
) -> Counts:
    """Returns the errors of a condition, of all layers or of a single one; those of baselines count for each model."""
    voices = {_stem(line): line[VOICE] for line in read_lines(output / f"{language}-test-characters.json")}
    suffix = "" if layer is None else f"_layer_{layer}"

    def errors(letter: str, features: str) -> ErrorCounts:
        lines = []
        for part, wanted in row.parts:
            found = read_lines(output / Job(language, part, kind, letter).slug / "hypotheses.jsonl")
            lines += [line for line in found if _voice(line, voices) in wanted]
        return errors_of(lines, features)

    def of_all_models(features: str) -> ErrorCounts:
        return reduce(add, [errors(blind.LETTERS[0], features)] * len(letters))

    trained = reduce(add, (errors(letter, f"trained{suffix}") for letter in letters))
    return Counts(trained, of_all_models(f"untrained{suffix}"), of_all_models("log_mel"))


def _stem(line: Line) -> str:
    return str(Path(line["audio_filepath"]).with_suffix(""))


def _voice(hypothesis: Line, voices: dict[str, str]) -> str:
    """Returns the voice of a line of hypotheses, whose id is the end of the path of its audio."""
    (found,) = (voice for stem, voice in voices.items() if f"/{stem}".endswith(f"/{hypothesis['id']}"))
    return found


def tables(output: Path, rows: Mapping[str, Sequence[Row]], data: Sequence[Data], variants: Variants) -> str:
    """Returns all tables, with one line for each variant, which may be a letter."""
    conditions = table_text(CONDITION_COLUMNS, _condition_rows(output, rows, data, variants))
    gains = table_text(GAIN_COLUMNS, gain_rows(output, rows, variants))
    layers = table_text(LAYER_COLUMNS, _layer_rows(output, rows, variants))
    sentences = "\n".join(_label_sentences(output, rows))
    return f"{conditions}\n\n{gains}\n\n{layers}\n\n{sentences}\n"


CONDITION_COLUMNS = ["language", "heads learn from", "scored on", "units, head", "lines", "log-mel", "untrained"]
CONDITION_COLUMNS += ["model", "trained", "minus untrained", "minus log-mel"]


def _condition_rows(
    output: Path, rows: Mapping[str, Sequence[Row]], data: Sequence[Data], variants: Variants
) -> Iterator[list[str]]:
    for one in data:
        test = read_lines(output / f"{one.name}-test-characters.json")
        for row in rows[one.name]:
            num_lines = len(of_voices(test, frozenset[str]().union(*(voices for _, voices in row.parts))))
            for kind in _kinds(one, is_single=row.training == "one voice"):
                for name, letters in variants.items():
                    found = counts_of(output, one.name, row, kind, letters)
                    baselines = [percent(error_rate(found.log_mel)), percent(error_rate(found.untrained))]
                    cells = [one.name, row.training, row.test, SHOWN_KINDS[kind], str(num_lines), *baselines, name]
                    yield [*cells, percent(error_rate(found.trained)), *_gains(found)]


def _gains(counts: Counts) -> list[str]:
    """Returns the errors of the trained encoder minus those of the untrained one and of log-mels."""
    return [percent(error_difference(counts.trained, other)) for other in counts[1:]]


def _excesses(counts: Counts) -> list[tuple[Any, Any]]:
    """Returns the same without intervals, by scene, with the length of the texts."""
    return [(counts.trained.errors - other.errors, counts.trained.num_reference) for other in counts[1:]]


GAIN_COLUMNS = ["language", "condition", "minus condition", "model"]
GAIN_COLUMNS += [f"trained minus {baseline}, difference" for baseline in ("untrained", "log-mel")]
COMPARED = [
    (("two voices", "the same two"), ("all voices", "the two main voices")),
    (("two voices", "the other voices"), ("all voices", "the other voices")),
    (("one voice", "the other of the two"), ("one voice", "the same")),
]
"""Conditions that are scored on the same lines."""


def gain_rows(output: Path, rows: Mapping[str, Sequence[Row]], variants: Variants) -> Iterator[list[str]]:
    """Compares conditions by their differences from the untrained encoder and from log-mels."""
    for language, found in rows.items():
        by_name = {(row.training, row.test): row for row in found}
        for pair in COMPARED:
            if not set(pair) <= by_name.keys():
                continue
            for name, letters in variants.items():
                both = [counts_of(output, language, by_name[each], "characters", letters) for each in pair]
                excesses = zip(*map(_excesses, both), strict=True)
                gains = [percent(ratio_difference(excess, of_other, 0)) for excess, of_other in excesses]
                yield [language, *map(" to ".join, pair), name, *gains]


LAYER_COLUMNS = ["language", "heads learn from", "layer", "model", "CER, untrained", "CER, trained", "minus untrained"]
LAYER_COLUMNS += ["minus log-mel", *(f"{what}, {of}" for what in ("voice", "scene") for of in ("untrained", "trained"))]


def _layer_rows(output: Path, rows: Mapping[str, Sequence[Row]], variants: Variants) -> Iterator[list[str]]:
    """Returns the content, the voice and the scene in each layer."""
    for language, (row, *_) in rows.items():  # the row of the largest set
        first = _label_probes(output, language, blind.LETTERS[0])
        probes = {name: [_label_probes(output, language, each) for each in found] for name, found in variants.items()}
        for layer in range(len(first[VOICE]["trained"])):
            for name, letters in variants.items():
                counts = counts_of(output, language, row, "characters", letters, layer)
                cells = [language, row.training, str(layer), name, percent(error_rate(counts.untrained))]
                cells += [percent(error_rate(counts.trained)), *_gains(counts)]
                for label in LABELS:
                    cells.append(_accuracies([first[label]["untrained"][layer]]))
                    cells.append(_accuracies([each[label]["trained"][layer] for each in probes[name]]))
                yield cells


def _label_sentences(output: Path, rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    for language in rows:
        for label, probe in _label_probes(output, language, blind.LETTERS[0]).items():
            chance, log_mel = (_accuracies([probe[features]]) for features in ("chance", "log_mel"))
            yield (
                f"- {language}, {label}: {len(probe['classes'])} classes, {probe['num_train']} training utterances, "
                f"{probe['num_held_out']} held out. Accuracy by chance {chance} %, from log-mel statistics {log_mel} %."
            )


def _label_probes(output: Path, language: str, letter: str) -> dict[str, dict[str, Any]]:
    return {label: read_probe(output / Job(language, "labels", label, letter).slug) for label in LABELS}


def _accuracies(scores: Sequence[dict[str, float]]) -> str:
    """Returns the accuracy with its interval, or those of several models without intervals."""
    if len(scores) > 1:
        return ", ".join(f"{100 * score['accuracy']:.1f}" for score in scores)
    return accuracy(scores[0])


def _head(arguments: argparse.Namespace, names: Sequence[str], descriptions: Sequence[str], digest: str) -> str:
    """Returns what stands before the tables."""
    script = "benchmarks/learning/where.py"
    lines = "\n".join(f"- {one}" for one in descriptions)
    return f"""# Where the content is, and for whom

{commit_line()}

Made by `{script}`{" --quick" if arguments.quick else ""} on {machine("CPU cores")}, \
{versions("torch", "jiwer", "scikit-learn")}.
Flags of the content probes: `{arguments.probe_options}`. Models: {", ".join(sorted(names))}.
They had letters until the figures were written (SHA-256 of figures.md: `{digest}`).

{lines}

{PURPOSES[arguments.purpose]}
All sets of lines from which heads learn last equally long, so that voices are not confounded with the amount of \
speech. Error rates in %, differences in percentage points, with 95 % bootstrap intervals over scenes; below 0 the \
trained encoder is better. The intervals cover the choice of scenes, not that of seeds. Phones are those of espeak-ng, \
without spaces. Voice: accuracy in % on the test lines. Scene: on a quarter of the lines of one set and of the test \
lines.

"""


if __name__ == "__main__":
    sys.exit(main())
