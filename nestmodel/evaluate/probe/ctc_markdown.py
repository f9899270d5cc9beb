"""The report of the content probe in Markdown."""

from collections.abc import Iterator

from nestmodel.evaluate.error_rates import percent
from nestmodel.evaluate.probe.contestants import contestant_name
from nestmodel.evaluate.probe.ctc_head import MAX_GRADIENT_NORM, UTTERANCES_PER_STEP
from nestmodel.evaluate.probe.ctc_report import ContestantScore, CtcProbeReport, Difference, SeedScore
from nestmodel.evaluate.probe.report import table, unusable_lines
from nestmodel.evaluate.probe.utterances import split_name
from nestmodel.evaluate.probe_config import CtcProbeConfig
from nestmodel.evaluate.text import NORMALISATION


def markdown(report: CtcProbeReport) -> str:
    """Returns the content of `report.md`."""
    parts = (_results(report), _training(report), _texts(report), _examples(report))
    return "\n".join(line for part in parts for line in part) + "\n"


def _results(report: CtcProbeReport) -> Iterator[str]:
    yield f"# Content probe of {report.model or 'a model'}"
    yield ""
    yield (
        "A linear CTC head on frozen features, with learned weights of the layers and greedy decoding. Error rates on "
        f"{report.num_test} test utterances in %, with 95 % bootstrap intervals over {report.intervals_over}. The "
        f"errors of all heads are added up; their seeds: {', '.join(map(str, report.config.probe_seeds))}."
    )
    yield ""
    columns = "features | CER | WER | insertions | deletions | substitutions | CER by seed"
    yield from table(columns, map(_error_row, report.contestants))
    yield "Insertions, deletions and substitutions are of characters, in % of the characters of the references."
    yield ""
    if not report.differences:
        return
    yield "Trained minus baseline, in percentage points (paired bootstrap); below 0 the trained encoder is better:"
    yield ""
    yield from table("baseline | CER | WER | CER by seed", map(_difference_row, report.differences))
    rates = report.config.learning_rates
    at_an_edge = [score.name for score in report.contestants if score.learning_rate in (min(rates), max(rates))]
    if at_an_edge:
        yield (
            "**The learning rate may explain a part of these differences**: the lowest or the highest one was best for "
            f"{', '.join(map(contestant_name, at_an_edge))}. Give rates beyond it with `--learning-rates`."
        )
        yield ""


def _training(report: CtcProbeReport) -> Iterator[str]:
    config = report.config
    yield "## Training of the heads"
    yield ""
    yield (
        f"{report.num_training} utterances for training; {report.num_held_out} held out, "
        f"{split_name(config.group_by)}, which select the learning rate and the epoch by their character error rate. "
        "Dimensions are standardised with the training frames. Adam, gradients clipped to norm "
        f"{MAX_GRADIENT_NORM:g}, {UTTERANCES_PER_STEP} utterances per step; the learning rate falls linearly to 0 over "
        f"{config.max_epochs} epochs{_early_end(config)}. Labels per frame of "
        f"{1000 / report.frame_rate_hz:.0f} ms: {config.labels_per_frame}. Utterances with more characters than label "
        f"frames: {report.num_too_fast['training']} of the training corpus, left out; {report.num_too_fast['test']} of "
        f"the test corpus, scored. Seed of the split, the untrained encoder and the bootstrap: {config.seed}."
    )
    yield ""
    yield from table(
        "features | parameters | held-out CER by learning rate | chosen | seed | best epoch | epochs | steps | "
        "weights of the layers",
        (_head_row(score, head) for score in report.contestants for head in score.seeds),
    )


def _rates(found: ContestantScore | Difference) -> str:
    return f"{percent(found.characters)} | {percent(found.words)}"


def _by_seed(score: ContestantScore) -> str:
    return ", ".join(f"{100 * seed.characters.rate:.1f}" for seed in score.seeds)


def _error_row(score: ContestantScore) -> str:
    found = score.characters
    counts = (found.insertions, found.deletions, found.substitutions)
    shares = " | ".join(f"{100 * count / found.num_reference:.1f}" for count in counts)
    return f"{contestant_name(score.name)} | {_rates(score)} | {shares} | {_by_seed(score)}"


def _difference_row(difference: Difference) -> str:
    singles = "; ".join(percent(estimate) for estimate in difference.characters_by_seed)
    return f"{contestant_name(difference.baseline)} | {_rates(difference)} | {singles}"


def _head_row(score: ContestantScore, head: SeedScore) -> str:
    rates = ", ".join(f"{rate:g}: {100 * value:.1f}" for rate, value in score.held_out_error_rates.items())
    weights = " ".join(f"{weight:.2f}" for weight in head.layer_weights)
    training = f"{head.seed} | {head.best_epoch} | {head.num_epochs} | {head.num_steps}"
    features = f"{contestant_name(score.name)} | {score.num_parameters} | {rates} | {score.learning_rate:g}"
    return f"{features} | {training} | {weights}"


def _early_end(config: CtcProbeConfig) -> str:
    if config.patience >= config.max_epochs:
        return ""
    return f", and training ends early after {config.patience} epochs without improvement"


def _texts(report: CtcProbeReport) -> Iterator[str]:
    yield "## Texts"
    yield ""
    for rule in NORMALISATION:
        yield f"- {rule}"
    yield ""
    yield f"Alphabet, from the training texts: {len(report.alphabet)} characters, `{report.alphabet}`."
    unknown = ", ".join(f"`{character}` {count}" for character, count in report.unknown_characters.items())
    yield f"Characters of the test texts outside the alphabet, each an error: {unknown or 'none'}."
    yield f"Test utterances whose text is also in the training corpus: {report.num_known_texts}."
    yield from unusable_lines(report.left_out)
    yield ""


def _examples(report: CtcProbeReport) -> Iterator[str]:
    yield "## Examples"
    yield ""
    yield f"Drawn by a hash of their ids; with seed {report.config.probe_seeds[0]}."
    for example in report.examples:
        yield ""
        yield f"    {example.cut_id}"
        yield f"    text        {example.reference}"
        for name, text in example.hypotheses.items():
            yield f"    {contestant_name(name):<11} {text}"
