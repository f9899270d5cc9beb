"""Shows where the content of frozen encoders is, and for whose speech: voices, languages, layers, heads, units.

    python benchmarks/bench_where.py OUTPUT --data Czech=cs,train.json,test.json --data Dutch=nl,train.json,test.json \
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
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from importlib.metadata import version
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import phones
import soundfile
from bench_learning import environment
from blind import LETTERS, add_models, check_models, digests_of, draw_once, first_alike, hide_names, named_models
from kept_settings import keep_settings
from measured import measured_line
from peer import run_peer
from transcribed import PURPOSES, Line, errors_of, read_lines, read_manifest, read_probe, write_lines

from nestmodel import ErrorCounts, Estimate, error_difference, error_rate
from nestmodel.evaluate.error_rates import percent, ratio_difference

GROUP, VOICE = "scene", "speaker"
HIDDEN = 256
QUICK = "--max-epochs 1 --learning-rates 0.05 --probe-seeds 0"
QUICK_HOURS = 0.02
MAX_SECONDS = 3600.0  # a header without the length of its audio gives a huge one
KINDS = {"characters": "", "hidden": f"--hidden {HIDDEN}", "phones": ""}
SHOWN_KINDS = {"characters": "characters, linear", "hidden": f"characters, hidden {HIDDEN}", "phones": "phones, linear"}
LABELS = {VOICE: "--held-out-where side=test", GROUP: ""}


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


class Row(NamedTuple):
    """A condition: which test lines are scored with the heads of which training sets."""

    training: str
    test: str
    parts: list[tuple[str, frozenset[str]]]
    """Training sets, and the voices whose test lines are counted."""


def main() -> int:
    """Scores all models under hidden names, and writes the results."""
    arguments = _arguments()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    models = named_models(arguments.model)
    if len(set(first_alike(models).values())) > 1:
        raise SystemExit("the models have different encoders: compare them in calls of their own.")
    kept = {"data": json.dumps([[str(part) for part in one] for one in arguments.data]), "models": digests_of(models)}
    keep_settings(
        output,
        {**kept, "probe_options": arguments.probe_options, "purpose": arguments.purpose, "quick": arguments.quick},
    )
    letters = hide_names(output, models)
    rows, descriptions = prepare(arguments.data, output, arguments.quick)
    jobs = {job.slug: job for job in list_jobs(rows, arguments.data, list(letters))}
    order = [jobs[slug] for slug in draw_once(output / "order.json", list(jobs))]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda job: _score(output, job, arguments), order))
    by_letter = {letter: [letter] for letter in letters}
    figures = "\n".join(tables(output, rows, arguments.data, by_letter))
    (output / "figures.md").write_text(figures, encoding="utf-8")
    digest = hashlib.sha256(figures.encode()).hexdigest()
    print(f"{output / 'figures.md'}: {digest}; now the letters are resolved")
    variants: dict[str, list[str]] = {}
    for name in models:  # in the order of the command, not in that of the letters
        letter = next(letter for letter, drawn in letters.items() if drawn == name)
        variants.setdefault(name.rpartition("/")[0] or name, []).append(letter)
    text = "\n".join(
        [*_head(arguments, letters, descriptions, digest), *tables(output, rows, arguments.data, variants)]
    )
    arguments.results.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", action="append", required=True, type=_data, metavar="NAME=VOICE,TRAIN,TEST")
    add_models(parser)
    parser.add_argument("--purpose", choices=PURPOSES, required=True, help="what the test lines are used for")
    parser.add_argument("--probe-options", default="", help="further flags of `nestmodel probe --task ctc`")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="probes at the same time")
    parser.add_argument("--results", type=Path, default=Path("where.md"))
    parser.add_argument("--quick", action="store_true", help="few utterances and steps, to check the script")
    arguments = parser.parse_args()
    check_models(parser, arguments.model)
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
        voices = Counter[str]()
        for line in train:
            voices[line[VOICE]] += line["duration"]
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


def main_voices(lines: Sequence[Line]) -> tuple[str, str]:
    """Returns the two voices that speak longest."""
    spoken = Counter[str]()
    for line in lines:
        spoken[line[VOICE]] += line["duration"]
    if len(spoken) < 2:
        raise SystemExit(f"the lines have {len(spoken)} voices in the field {VOICE!r}: two are needed.")
    (one, _), (other, _) = spoken.most_common(2)
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
        kinds = [kind for kind in KINDS if kind != "phones" or one.espeak_voice]
        for letter in letters:
            jobs += [
                Job(one.name, part, kind, letter)
                for part in sets
                for kind in (kinds[:1] if part.startswith("one-") else kinds)
            ]
            jobs += [Job(one.name, "labels", label, letter) for label in LABELS]
    return jobs


def _score(output: Path, job: Job, arguments: argparse.Namespace) -> None:
    if (output / job.slug / "probe.json").exists():
        return
    if job.training_set == "labels":
        task = f"{job.language}-labels.json --label {job.kind} {LABELS[job.kind]}"
    else:
        units = "phones" if job.kind == "phones" else "characters"
        is_layered = job.kind == "characters" and job.training_set == _largest_set(output, job.language)
        layers = "--each-layer" if is_layered else ""
        baselines = "" if job.letter == LETTERS[0] else "--baselines none"
        task = (
            f"{job.language}-{job.training_set}-{units}.json --test {job.language}-test-{units}.json --task ctc "
            f"--group-by {GROUP} {KINDS[job.kind]} {layers} {baselines} "
            f"{QUICK if arguments.quick else ''} {arguments.probe_options}"
        )
    command = f"nestmodel probe {job.letter}.ckpt {task} --overwrite -o {job.slug}"
    print("$", command, flush=True)
    run_peer(shlex.split(command), cwd=output, env=environment())


def _largest_set(output: Path, language: str) -> str:
    """Returns the training set with the most voices, from whose layers heads learn as well."""
    return "all" if (output / f"{language}-all-characters.json").exists() else "two"


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
        return errors_of(sorted(lines, key=lambda line: str(line["id"])), features)

    def of_all_models(features: str) -> ErrorCounts:
        return reduce(add, [errors(LETTERS[0], features)] * len(letters))

    trained = reduce(add, (errors(letter, f"trained{suffix}") for letter in letters))
    return Counts(trained, of_all_models(f"untrained{suffix}"), of_all_models("log_mel"))


def _stem(line: Line) -> str:
    return str(Path(line["audio_filepath"]).with_suffix(""))


def _voice(hypothesis: Line, voices: dict[str, str]) -> str:
    """Returns the voice of a line of hypotheses, whose id is the end of the path of its audio."""
    (found,) = (voice for stem, voice in voices.items() if f"/{stem}".endswith(f"/{hypothesis['id']}"))
    return found


def tables(output: Path, rows: dict[str, list[Row]], data: Sequence[Data], variants: dict[str, list[str]]) -> list[str]:
    """Returns all tables, with one line for each variant, which may be a letter."""
    return [
        *_condition_table(output, rows, data, variants),
        *_gain_table(output, rows, variants),
        *_layer_table(output, rows, variants),
    ]


def _condition_table(
    output: Path, rows: dict[str, list[Row]], data: Sequence[Data], variants: dict[str, list[str]]
) -> list[str]:
    lines = [
        "| language | heads learn from | scored on | units, head | lines | log-mel | untrained | model | trained | "
        "minus untrained | minus log-mel |",
        "|" + "---|" * 11,
    ]
    for one in data:
        test = read_lines(output / f"{one.name}-test-characters.json")
        for row in rows[one.name]:
            num_lines = len(of_voices(test, frozenset[str]().union(*(voices for _, voices in row.parts))))
            for kind in KINDS:
                if (kind == "phones" and not one.espeak_voice) or (
                    kind != "characters" and row.training == "one voice"
                ):
                    continue
                for name, letters in variants.items():
                    found = counts_of(output, one.name, row, kind, letters)
                    rates = [percent(error_rate(each)) for each in (found.log_mel, found.untrained)]
                    gains = [
                        percent(error_difference(found.trained, each)) for each in (found.untrained, found.log_mel)
                    ]
                    cells = [one.name, row.training, row.test, SHOWN_KINDS[kind], str(num_lines), *rates, name]
                    lines.append(f"| {' | '.join([*cells, percent(error_rate(found.trained)), *gains])} |")
    return [*lines, ""]


def _gain_table(output: Path, rows: dict[str, list[Row]], variants: dict[str, list[str]]) -> list[str]:
    """Compares conditions that are scored on the same lines by their differences from the untrained encoder."""
    pairs = [
        (("two voices", "the same two"), ("all voices", "the two main voices")),
        (("two voices", "the other voices"), ("all voices", "the other voices")),
        (("one voice", "the other of the two"), ("one voice", "the same")),
    ]
    lines = [
        "| language | condition | minus condition | model | trained minus untrained, difference | "
        "trained minus log-mel, difference |",
        "|" + "---|" * 6,
    ]
    for language, found in rows.items():
        by_name = {(row.training, row.test): row for row in found}
        for first, second in pairs:
            if not {first, second} <= by_name.keys():
                continue
            for name, letters in variants.items():
                one, other = (
                    counts_of(output, language, by_name[each], "characters", letters) for each in (first, second)
                )
                cells = [language, " to ".join(first), " to ".join(second), name]
                cells += [
                    percent(ratio_difference(_excess(one, baseline), _excess(other, baseline), 0))
                    for baseline in ("untrained", "log_mel")
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _excess(counts: Counts, baseline: str) -> tuple[Any, Any]:
    other: ErrorCounts = getattr(counts, baseline)
    return counts.trained.errors - other.errors, counts.trained.num_reference


def _layer_table(output: Path, rows: dict[str, list[Row]], variants: dict[str, list[str]]) -> list[str]:
    """Returns the content, the voice and the scene in each layer."""
    lines = [
        "| language | heads learn from | layer | model | CER, untrained | CER, trained | minus untrained | "
        "minus log-mel | voice, untrained | voice, trained | scene, untrained | scene, trained |",
        "|" + "---|" * 12,
    ]
    sentences = []
    for language, found in rows.items():
        first = {label: read_probe(output / Job(language, "labels", label, LETTERS[0]).slug) for label in LABELS}
        row = found[0]  # that of the largest set
        for layer in range(len(first[VOICE]["trained"])):
            for name, letters in variants.items():
                counts = counts_of(output, language, row, "characters", letters, layer)
                cells = [language, row.training, str(layer), name, percent(error_rate(counts.untrained))]
                cells += [percent(error_rate(counts.trained))]
                cells += [percent(error_difference(counts.trained, each)) for each in counts[1:]]
                for label in LABELS:
                    probes = [read_probe(output / Job(language, "labels", label, letter).slug) for letter in letters]
                    cells.append(_accuracies([first[label]["untrained"][layer]]))
                    cells.append(_accuracies([probe["trained"][layer] for probe in probes]))
                lines.append(f"| {' | '.join(cells)} |")
        sentences += [
            f"- {language}, {label}: {len(probe['classes'])} classes, {probe['num_train']} training utterances, "
            f"{probe['num_held_out']} held out. Accuracy by chance {_accuracies([probe['chance']])} %, from log-mel "
            f"statistics {_accuracies([probe['log_mel']])} %."
            for label, probe in first.items()
        ]
    return [*lines, "", *sentences, ""]


def _accuracies(scores: Sequence[dict[str, float]]) -> str:
    """Returns the accuracy with its interval, or those of several models without intervals."""
    if len(scores) > 1:
        return ", ".join(f"{100 * score['accuracy']:.1f}" for score in scores)
    return percent(Estimate(scores[0]["accuracy"], scores[0]["low"], scores[0]["high"]))


def _head(
    arguments: argparse.Namespace, letters: dict[str, str], descriptions: Sequence[str], digest: str
) -> list[str]:
    """Returns what stands before the tables."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jiwer", "scikit-learn"))
    quick = " --quick" if arguments.quick else ""
    parts = [f"nestmodel/evaluate/probe/{name}.py" for name in ("ctc", "ctc_head", "labels", "training")]
    measured = measured_line("benchmarks/bench_where.py", "benchmarks/phones.py", *parts, "nestmodel/nn")
    return [
        "# Where the content is, and for whom",
        "",
        measured,
        "",
        f"Made by `benchmarks/bench_where.py`{quick} on {os.cpu_count()} CPU cores ({platform.machine()}), {packages}.",
        f"Flags of the content probes: `{arguments.probe_options}`. Models: {', '.join(sorted(letters.values()))}.",
        f"They had letters until the figures were written (SHA-256 of figures.md: `{digest}`).",
        "",
        *(f"- {one}" for one in descriptions),
        "",
        PURPOSES[arguments.purpose],
        "All sets of lines from which heads learn last equally long, so that voices are not confounded with the "
        "amount of speech. Error rates in %, differences in percentage points, with 95 % bootstrap intervals over "
        "scenes; below 0 the trained encoder is better. The intervals cover the choice of scenes, not that of seeds. "
        "Phones are those of espeak-ng, without spaces. Voice: accuracy in % on the test lines. Scene: on a quarter "
        "of the lines of one set and of the test lines.",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
