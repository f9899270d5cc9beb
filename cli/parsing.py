"""Command lines: tyro makes options from the parameters of functions and the fields of our dataclasses.

This module says what tyro cannot know: which settings have a short name beside the dotted one, which of them the short
help shows, and that a setting which holds other values, such as a list of stages, is given as YAML. A mistake becomes
one line.
"""

import ast
import contextlib
import inspect
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from itertools import dropwhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
import yaml
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from nestdata import ConfigError
from nestdata.config_checks import nearest_name_hint
from nestdata.field_docs import field_summaries
from nestmodel.other_names import name_here
from nestmodel.plain_values import convert, places, read_yaml, to_plain

Result = TypeVar("Result")

COMMON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "RunConfig": {"seed": (), "output": ("-o",), "log": (), "quiet": (), "ckpt_path": (), "resume": ()},
    "DataConfig": {
        "corpus": (),
        "noise": ("--noise",),
        "val_corpus": ("--val-corpus",),
        "num_workers": ("--num-workers",),
    },
    "MixConfig": {"prob": ("--mix-prob",)},
    "PlanConfig": {
        "max_batch_seconds": ("--max-batch-seconds",),
        "microbatches_per_step": ("--microbatches-per-step",),
        "num_shapes": ("--num-shapes",),
        "weights": ("--weights",),
        "temperature": ("--temperature",),
    },
    "ModelConfig": {"init_from": ("--init-from",)},
    "OptimizerConfig": {"lr": ("--lr",), "schedule": ("--schedule",), "warmup_steps": ("--warmup-steps",)},
    "TrainerConfig": {
        "max_steps": ("--max-steps",),
        "max_time": ("--max-time",),
        "val_check_interval": ("--val-check-interval",),
        "early_stop": ("--early-stop",),
        "log_every_n_steps": ("--log-every-n-steps",),
        "gradient_clip_val": ("--grad-clip",),
        "precision": ("--precision",),
        "accelerator": ("--accelerator",),
        "devices": ("--devices",),
        "num_nodes": ("--num-nodes",),
    },
}
"""The settings that people set, by class and field, with their names beside the dotted one. `-h` shows these."""

_NO_OPTIONS = {("PlanConfig", "seed"), ("NestConfig", "seed"), ("PrepareConfig", "segment")}
"""Fields that follow from others: from the seed of the run, and from options of the command."""

_REPLACES_FILES = ("RunConfig", "log")
"""A field whose option is repeated: its values replace those of files, to which tyro would add them."""

_HELP = ("-h", "--help")
HELP_ALL = "--help-all"

Unprefixed = tyro.conf.arg(name="")
"""Marks a parameter whose fields are options without its name in front."""

Positionals: Any = tyro.conf.Positional
"""Marks a parameter that takes the arguments without an option."""


Repeatable: Any = tyro.conf.UseAppendAction
"""Marks a parameter whose option takes one value and may be given several times."""


class UsageError(Exception):
    """The command line is invalid."""


def option(*names: str, name: str | None = None, metavar: str | None = None, help: str | None = None) -> Any:
    """Marks a parameter that has another name, further names such as `-o`, a placeholder or a help of its own.

    A parameter with a placeholder shows no default: its help says what applies without it.
    """
    hint = None if metavar is None else ""
    return tyro.conf.arg(name=name, aliases=names or None, metavar=metavar, help=help, help_behavior_hint=hint)


def parse(function: Callable[..., Result], arguments: Sequence[str], *, prog: str, about: str) -> Result:
    """Calls a function with the parameters that a command line gives, and returns its result.

    Args:
        function: Its parameters are options; those marked `Positionals` are arguments.
        arguments: The words after the command.
        prog: Program and command, for the help.
        about: What the command does, with examples.

    Raises:
        UsageError: The command line is invalid.
        SystemExit: Help was asked for, and has been printed.
    """
    is_short = not {*_HELP}.isdisjoint(arguments)
    unprefixed = _unprefixed(function)
    # Files may set what an option then turns off.
    has_settings = not unprefixed.isdisjoint({"RunConfig", "DataConfig"})
    registry = _registry(unprefixed, is_short=is_short)
    if has_settings and is_short:
        about += f"\n\nThese are the options that are often set; {HELP_ALL} shows all."
    words = ["--help" if word in (HELP_ALL, *_HELP) else word for word in arguments]
    mistake = io.StringIO()
    parsed: list[dict[str, Any]] = []

    def run(words: list[str]) -> None:
        tyro.cli(
            _keeping(function, parsed.append),
            prog=prog,
            description=about,
            args=words,
            config=() if has_settings else (tyro.conf.FlagCreatePairsOff,),
            registry=registry,
        )

    try:
        with contextlib.redirect_stderr(mistake):
            run(words)
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        shown = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            run(["--help"])
        message = _message(mistake.getvalue(), shown.getvalue(), arguments)
        raise UsageError(f"{message} See `{prog} {HELP_ALL if has_settings else _HELP[1]}`.") from None
    _check_given(function, parsed[0])
    return function(**parsed[0])


def _check_given(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raises UsageError if there is no value of a parameter that takes any number of words, and has no default."""
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function, include_extras=True)
    for name, value in values.items():
        if value == () and parameters[name].default is inspect.Parameter.empty:
            marks = get_args(hints[name])
            metavars = [mark.metavar for mark in marks if hasattr(mark, "metavar")]
            shown = metavars[0] if Positionals in marks else f"--{name.replace('_', '-')}"
            raise UsageError(f"{shown} is missing: give one or more.")


def print_completion(functions: Mapping[str, Callable[..., Any]], prog: str, *, language: str) -> None:
    """Prints a script with which a shell completes the options of a program's commands.

    Raises:
        UsageError: There is none for the shell.
    """
    if language not in ("bash", "zsh", "tcsh"):
        raise UsageError(f"--print-completion {language}: give bash, zsh or tcsh.")
    app = tyro.extras.SubcommandApp()
    for name, function in functions.items():
        app.command(name=name)(_keeping(function, lambda _: None))
    with contextlib.suppress(SystemExit):
        app.cli(prog=prog, args=["--tyro-print-completion", language], registry=_registry(set(), is_short=False))


def _keeping(function: Callable[..., Any], keep: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Returns a function with the parameters of another one that only keeps what it is called with."""

    def kept(**values: Any) -> None:
        keep(values)

    kept.__signature__ = _signature(function)  # type: ignore[attr-defined]  # what inspect reads
    kept.__annotations__ = get_type_hints(function, include_extras=True)
    kept.__doc__ = function.__doc__
    return kept


def _signature(function: Callable[..., Any]) -> Any:
    own = inspect.signature(function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return own.replace(parameters=[parameter.replace(kind=keyword) for parameter in own.parameters.values()])


def _unprefixed(function: Callable[..., Any]) -> set[str]:
    """Returns the names of the classes whose fields are options of a function without a name in front."""
    hints = get_type_hints(function, include_extras=True).values()
    return {get_args(hint)[0].__name__ for hint in hints if Unprefixed in get_args(hint)}


def _registry(unprefixed: Collection[str], *, is_short: bool) -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.struct_rule
    def of_our_dataclasses(info: StructTypeInfo) -> StructConstructorSpec | None:
        cls = info.type
        if not is_dataclass(cls) or not cls.__module__.startswith(("nestcli", "nestdata", "nestguard", "nestmodel")):
            return None
        summaries, hints = field_summaries(cls), get_type_hints(cls, include_extras=True)
        specs = []
        of_files: Any = ()
        for part in fields(cls):
            default = getattr(info.default, part.name) if isinstance(info.default, cls) else _default_of(part)
            hint = _option_type(cls.__name__, part.name, hints[part.name], default, is_short=is_short)
            if cls.__name__ in unprefixed:
                hint = _without_own_name(hint, part.name)
            if (cls.__name__, part.name) == _REPLACES_FILES:
                of_files, default = default, ()
            specs.append(StructFieldSpec(part.name, hint, default, helptext=summaries[part.name]))
        if cls.__name__ != _REPLACES_FILES[0]:
            return StructConstructorSpec(cls, tuple(specs))

        def build(**values: Any) -> Any:
            return cls(**{**values, _REPLACES_FILES[1]: values[_REPLACES_FILES[1]] or of_files})

        return StructConstructorSpec(build, tuple(specs))

    return registry


def _default_of(part: Any) -> Any:
    if part.default is not MISSING:
        return part.default
    return tyro.MISSING if part.default_factory is MISSING else part.default_factory()


def _option_type(owner: str, name: str, hint: Any, default: Any, *, is_short: bool) -> Any:
    """Returns the type of a field with the marks that make it the option it is."""
    if (owner, name) in _NO_OPTIONS:
        return Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
    if is_dataclass(hint):
        return hint
    if all(map(is_dataclass, get_args(hint))) and type(default) in get_args(hint):
        return type(default)  # of several forms of a setting, that of files has options
    names = COMMON.get(owner, {}).get(name)
    if (owner, name) == ("DataConfig", "corpus"):
        return Annotated[tuple[Path, ...], tyro.conf.Positional, option(metavar="CORPUS")]
    marked = _as_yaml(hint, name) if _holds_values(hint) else hint
    if (owner, name) == _REPLACES_FILES:
        marked = Annotated[hint, Repeatable]
    if names:
        marked = Annotated[marked, tyro.conf.arg(aliases=names)]
    elif is_short and names is None and owner in COMMON_OWNERS:
        marked = Annotated[marked, tyro.conf.Suppress]
    return marked


COMMON_OWNERS = {
    *COMMON,
    "AugmentConfig",
    "BadAudioConfig",
    "CheckpointConfig",
    "ClassConfig",
    "EncoderConfig",
    "FeatureConfig",
    "GuardConfig",
    "MaskConfig",
    "NestConfig",
    "NoiseConfig",
    "QuantizerConfig",
    "RemoteConfig",
    "StallLimits",
}
"""Classes of a run, of which the short help shows the common settings only."""


def _without_own_name(hint: Any, name: str) -> Any:
    """Returns the type of a field without the short name that its option has anyway."""
    own, given = tyro.conf.arg(aliases=(f"--{name.replace('_', '-')}",)), get_args(hint)
    if own not in given:
        return hint
    others = tuple(mark for mark in given[1:] if mark != own)
    return Annotated[given[0], *others] if others else given[0]


def _holds_values(hint: Any) -> bool:
    """Returns whether a type contains mappings or dataclasses, which no single word of a command line gives."""
    is_mapping = hint is Any or get_origin(hint) is dict or hint is dict
    return is_mapping or is_dataclass(hint) or any(_holds_values(part) for part in get_args(hint))


def _as_yaml(hint: Any, name: str) -> Any:
    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: _value(words[0], hint, name),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [yaml.safe_dump(to_plain(value), default_flow_style=True).partition("\n")[0]],
    )
    return Annotated[Any, spec]


def _value(word: str, hint: Any, name: str) -> Any:
    try:
        return convert(read_yaml(word), hint, name)
    except (yaml.YAMLError, ConfigError) as error:
        raise ValueError(" ".join(str(error).split())) from error  # which tyro takes as a mistake of this option


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Codes of colours and fonts, which are there if the program writes to a terminal."""


def _message(box: str, help_of_all: str, arguments: Sequence[str]) -> str:
    """Returns the message of a box that tyro prints, with the name here, or the nearest one, of an unknown option."""
    box, help_of_all = _COLOURS.sub("", box), _COLOURS.sub("", help_of_all)
    rows = [re.sub(r"^[│╭╰─\s]+|[│╮╯─\s]+$", "", row) for row in box.splitlines()]
    title, *rows = rows or ["the command line is invalid"]
    # Where the terminal has no lines to draw, they are dashes, and one follows the title.
    rows = list(dropwhile(lambda row: not row.strip("-"), rows))
    end = next((number for number, row in enumerate(rows) if not row.strip("-")), len(rows))
    message = " ".join(rows[:end]) or title
    refused = re.search(r"(--[\w.-]+)\S*: no type matching (.+) could be instantiated from (\[.*\])", message)
    if refused:
        option, accepted, words = refused.groups()
        # Several types are written {None}|{[FLOAT [FLOAT ...]]}.
        accepted = re.sub(r"^\{\[?|\]?\}$", "", accepted).replace("}|{[", " or ").replace("}|", " or ")
        accepted = accepted.replace("|{", " or ").rstrip("}")
        first = "; arguments come before a list" if "..." in accepted else ""
        return f"{option} is {' '.join(ast.literal_eval(words))}: expected {accepted}{first}."
    unknown, found, words = message.partition("Unrecognized options: ")
    known = re.findall(r"(?<=[ ,])--[a-z][\w.-]*", help_of_all)
    if not found:  # a value may be missing because its option is unknown
        given = [word for word in arguments if re.match("--[a-z]", word)]
        words = next((word for word in given if word.partition("=")[0].replace("_", "-") not in known), "")
    if not words:
        return f"{message.rstrip('.')}."
    unknown = words.split(", ")[0]
    setting, equals, value = unknown.partition("=")
    if equals and not setting.startswith("-"):
        return f"{unknown} is no argument. {_as_option(setting, value, known)}"
    if not setting.startswith("-"):
        return f"{unknown} belongs to no option and is no argument here."
    options = {name[2:].replace("-", "_"): name for name in known}
    options |= {name.lower(): f"the argument {name}" for name in re.findall(r"\b(?:CORPUS|INPUT|MODEL)\b", help_of_all)}
    if here := name_here(setting, options):
        return f"unknown option {setting}; here it is {' or '.join(options[each] for each in here)}."
    return f"unknown option {setting}{nearest_name_hint(setting, known, min_similarity=0.7)}."


def check_no_settings(corpora: Iterable[Path]) -> None:
    """Raises UsageError for a corpus that is NAME=VALUE, as Hydra takes settings, with the option that it is here."""
    from nestmodel.run_config import RunConfig  # slow to import, and not needed for help

    for setting, equals, value in (str(path).partition("=") for path in corpora if not path.exists()):
        if equals:
            known = [f"--{name.replace('_', '-')}" for name in places(RunConfig)]
            raise UsageError(f"{setting}={value} is no corpus. {_as_option(setting, value, known)}")


def _as_option(setting: str, value: str, known: Collection[str]) -> str:
    """Returns how a setting that was given as NAME=VALUE is given as an option, of those that are known."""
    options = {name.lstrip("-").replace("-", "_"): name for name in known}
    here = name_here(setting, options) or get_close_matches(setting, options, n=1)
    if here == ["trainer.lightning"]:
        value = f"'{{{setting.rpartition('.')[2]}: {value}}}'"
    return f"Settings are options{': ' if here else ''}{' or '.join(f'{options[each]} {value}' for each in here)}."
