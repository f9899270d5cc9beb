"""`nestmodel probe`: measures what the encoder of a model has learned, beside baselines.

The tasks share one command, with the settings of their configurations as options; an option of another task is refused.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from nestdata.field_docs import field_summaries
from nestmodel import CtcProbeConfig, ProbeConfig

from ..arguments.errors import UsageError
from ..arguments.field_options import option_parameter, replacing
from ..arguments.options import (
    AsJson,
    AttentionContext,
    InputArguments,
    ModelArgument,
    Overwrite,
    chosen_context,
)
from ..output import print_json
from ..progress import progress
from .probe_summary import print_ctc_summary, print_label_summary

ProbeTask = Literal["labels", "ctc"]
_CONFIGS: dict[ProbeTask, type[Any]] = {"labels": ProbeConfig, "ctc": CtcProbeConfig}
_NEEDED: dict[ProbeTask, str] = {"labels": "label", "ctc": "test"}


def _numbers(name: str, kind: type[int] | type[float]) -> Any:
    def parsed(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(number) for number in text.split(","))
        except ValueError:
            raise UsageError(f"--{name} is {text!r}: give numbers separated by commas.") from None

    return typer.Option(parser=parsed, metavar="<str>")


def _baseline_names(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if not set(names) <= {"untrained", "log_mel"}:
        raise UsageError(f"--baselines is {text!r}: give untrained, log_mel, both with a comma between them, or none.")
    return names


_HELD_OUT = (
    "Share that is held out: of each class for scoring with labels, of the training utterances for the choice of "
    "learning rate and epoch otherwise."
)


def _options() -> list[inspect.Parameter]:
    """Returns the options of all tasks: those of some tasks, which begin with their names, before those of all."""
    given = {
        "held_out": typer.Option(help=_HELD_OUT),
        "held_out_where": typer.Option(metavar="FIELD=VALUE"),
        "group_by": typer.Option(metavar="FIELD"),
        "train_per_class": typer.Option(show_default="all"),
        "baselines": typer.Option(parser=_baseline_names, metavar="<str>"),
        "learning_rates": _numbers("learning-rates", float),
        "probe_seeds": _numbers("probe-seeds", int),
    }
    found: dict[str, dict[ProbeTask, Field[Any]]] = {}
    for task, config in _CONFIGS.items():
        for field in fields(config):
            found.setdefault(field.name, {})[task] = field
    unknown = given.keys() - found.keys()
    assert not unknown, f"no task has the fields {', '.join(sorted(unknown))}"
    some, common = [], []
    for name, by_task in found.items():
        config = _CONFIGS[next(iter(by_task))]
        option, hint = given.get(name, typer.Option()), get_type_hints(config)[name]
        option.help = option.help or field_summaries(config)[name]
        defaults = {task: _text(field.default) for task, field in by_task.items()}
        default, are_equal = next(iter(by_task.values())).default, len(set(defaults.values())) == 1
        if len(by_task) < len(_CONFIGS):
            option.help = f"{', '.join(by_task)}: {option.help[:1].lower()}{option.help[1:]}"
        elif are_equal:
            common.append(option_parameter(name, hint, option, default))
            continue
        shown = _text(default) if are_equal else ", ".join(f"{task} {text}" for task, text in defaults.items())
        option.show_default = shown or option.show_default
        some.append(option_parameter(name, hint | None, option))
    return some + common


def _text(default: object) -> str:
    """Returns a default as help shows it; empty for None and without one."""
    if isinstance(default, tuple):
        return ",".join(map(_text, default))
    if default is False:
        return "off"
    return "" if default is None or default is MISSING else str(default)


@replacing("options", _options(), dict)
def probe_command(
    model: ModelArgument,
    inputs: InputArguments,
    task: Annotated[
        ProbeTask,
        typer.Option(help="What is predicted: labels of utterances, or characters by CTC."),
    ] = "labels",
    test: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT", help="ctc: utterances to score, of other recordings. May be repeated."),
    ] = None,
    *,
    options: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the report and the rejects. [default: only print]"),
    ] = None,
    context: AttentionContext = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate what the encoder has learned, beside an untrained encoder and log-mels."""
    settings = options if test is None else {"test": test, **options}
    _check_task(task, settings)
    _run(task, model, context, inputs, settings, output, overwrite=overwrite, as_json=as_json)


def _run(
    task: ProbeTask,
    model: Path,
    context: str | None,
    inputs: list[str],
    settings: dict[str, Any],
    output: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    from nestmodel import load_network, run_ctc_probe, run_probe

    tasks: dict[ProbeTask, tuple[Callable[..., Any], Callable[[Any, Path | None], None]]] = {
        "labels": (run_probe, print_label_summary),
        "ctc": (run_ctc_probe, print_ctc_summary),
    }
    run, print_summary = tasks[task]
    sides = [inputs, settings.pop("test")] if "test" in settings else [inputs]
    network = load_network(model, chosen_context(context))
    with progress("probing") as on_progress:
        report = run(
            *(network, *sides, _CONFIGS[task](**settings), output),
            overwrite=overwrite,
            model_name=str(model),
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        print_summary(report, output)


def _check_task(task: ProbeTask, given: Collection[str]) -> None:
    """Checks the options that were given.

    Raises:
        UsageError: An option belongs to another task, or one is missing.
    """
    known = {other: {field.name for field in fields(config)} for other, config in _CONFIGS.items()}
    known["ctc"].add("test")
    for name in given:
        if name not in known[task]:
            tasks = " or ".join(other for other, names in known.items() if name in names)
            raise UsageError(f"{_flag(name)} belongs to --task {tasks}, and the task is {task}.")
    if _NEEDED[task] not in given:
        raise UsageError(f"--task {task} needs {_flag(_NEEDED[task])}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
