"""Command lines: tyro makes options from the parameters of functions and the fields of our dataclasses.

This module defines what tyro cannot know: which settings have a short name beside the dotted one, which of them the
short help shows, that a setting which holds other values, such as a list of stages, is given as YAML, and how an option
of another tool is named here.
"""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
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

from nestdata import ConfigError, redacted
from nestdata.field_docs import field_summaries
from nestmodel.class_config import ClassConfig
from nestmodel.config_files import convert, name_here, read_yaml, to_plain

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

_NO_OPTIONS = {
    ("PlanConfig", "seed"),
    ("NestConfig", "seed"),
    ("PrepareConfig", "segment"),
    ("BudgetConfig", "timeout_s"),
}
"""Fields without an option: they follow from the seed of the run or from options of the command."""

_SHOWN_IN_FULL = ("PreflightConfig", "BudgetConfig")
"""Classes of which the short help of a command with configurations shows all settings."""

_REPLACES_FILES = ("RunConfig", "log")
"""A field whose option may be repeated. The values replace the values of files; tyro alone would append them."""

_HELP = ("-h", "--help")
HELP_ALL = "--help-all"

Unprefixed = tyro.conf.arg(name="")
"""Marks a parameter whose fields are options without its name in front."""

Positionals: Any = tyro.conf.Positional
"""Marks a parameter that takes the arguments without an option."""


Repeatable: Any = tyro.conf.UseAppendAction
"""Marks a parameter whose option takes one value and may be given several times."""


class UsageError(Exception):
    """The command line is invalid.

    Args:
        message: What to do, in one line.
        explanation: The text that tyro would print.
    """

    def __init__(self, message: str, explanation: str = "") -> None:
        super().__init__(message)
        self.explanation = explanation


def option(*names: str, name: str | None = None, metavar: str | None = None, help: str | None = None) -> Any:
    """Marks a parameter that has another name, further names such as `-o`, a placeholder or a help of its own.

    A parameter with a placeholder shows no default: its help says what applies without it.
    """
    hint = None if metavar is None else ""
    return tyro.conf.arg(name=name, aliases=names or None, metavar=metavar, help=help, help_behavior_hint=hint)


def parse(
    function: Callable[..., Result], defaults: Mapping[str, Any], arguments: Sequence[str], *, prog: str, about: str
) -> Result:
    """Calls a function with the parameters that a command line gives, and returns its result.

    Args:
        function: Its parameters are options; those marked `Positionals` are arguments.
        defaults: Defaults of its parameters by name, from configurations; other names are ignored.
        arguments: The words after the command.
        prog: Program and command, for the help.
        about: What the command does, with examples.

    Raises:
        UsageError: The command line is invalid.
        SystemExit: Help was asked for, and has been printed.
    """
    is_short = bool(defaults) and not {*_HELP}.isdisjoint(arguments)
    if is_short:
        about += f"\n\nThese are the options that are often set; {HELP_ALL} shows all."
    kept, help_of_all = _keeping(function, defaults), f"See `{prog} {HELP_ALL if defaults else '--help'}`."
    if mistake := _name_here(arguments, _options(function)):
        raise UsageError(f"{mistake} {help_of_all}")
    read = partial(
        tyro.cli,
        kept,
        prog=prog,
        description=about,
        # Files may set what an option then turns off.
        config=() if defaults else (tyro.conf.FlagCreatePairsOff,),
        registry=_registry(is_short=is_short),
    )
    words = ["--help" if word in (HELP_ALL, *_HELP) else word for word in arguments]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            values = read(args=words)
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        # Secrets in URLs are left out before the text is broken into lines.
        with contextlib.redirect_stderr(io.StringIO()) as box, contextlib.suppress(SystemExit):
            read(args=[redacted(word) for word in words])
        explanation = box.getvalue()
        if defaults:
            explanation = explanation.replace(f"{prog} --help", f"{prog} {HELP_ALL}")
        mistake = _taken_as_value(arguments, explanation) or "the command line is invalid."
        raise UsageError(f"{mistake} {help_of_all}", explanation) from None
    for name, parameter in inspect.signature(kept).parameters.items():
        if values[name] == () and parameter.default is inspect.Parameter.empty:
            raise UsageError(f"{_options(function)[name]} is missing: give one or more.")
    return function(**values)


def print_completion(
    commands: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]], prog: str, *, language: str
) -> None:
    """Prints a script with which a shell completes the options of a program's commands.

    Args:
        commands: The function of each command, and the defaults of its parameters.
        prog: The program.
        language: Name of the shell.

    Raises:
        UsageError: There is no script for the shell.
    """
    if language not in ("bash", "zsh", "tcsh"):
        raise UsageError(f"--print-completion {language}: give bash, zsh or tcsh.")
    app = tyro.extras.SubcommandApp()
    for name, (function, defaults) in commands.items():
        app.command(name=name)(_keeping(function, defaults))
    with contextlib.suppress(SystemExit):
        app.cli(prog=prog, args=["--tyro-print-completion", language], registry=_registry(is_short=False))


def _keeping(function: Callable[..., Any], defaults: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Returns a function that has the parameters of another function, and returns the values it is called with.

    Args:
        function: The other function.
        defaults: Replace the defaults of its parameters.
    """

    def kept(**values: Any) -> dict[str, Any]:
        return values

    own, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
    parameters = [
        each.replace(kind=keyword, default=defaults.get(each.name, each.default)) for each in own.parameters.values()
    ]
    kept.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # what inspect reads
    kept.__annotations__ = get_type_hints(function, include_extras=True)
    kept.__doc__ = function.__doc__
    return kept


def _registry(*, is_short: bool) -> ConstructorRegistry:
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
    """Returns the type of a field, with the marks that define its option."""
    if (owner, name) in _NO_OPTIONS:
        return Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
    if is_dataclass(hint):
        return hint
    if all(map(is_dataclass, get_args(hint))) and type(default) in get_args(hint):
        return type(default)  # of several forms of a setting, the one in the files has options
    names = COMMON.get(owner, {}).get(name)
    if (owner, name) == ("DataConfig", "corpus"):
        return Annotated[tuple[Path, ...], tyro.conf.Positional, option(metavar="CORPUS")]
    marked = _as_yaml(hint, name) if _holds_values(hint) else hint
    if (owner, name) == _REPLACES_FILES:
        marked = Annotated[hint, Repeatable]
    if names:
        marked = Annotated[marked, tyro.conf.arg(aliases=names)]
    elif is_short and names is None and owner not in _SHOWN_IN_FULL:
        marked = Annotated[marked, tyro.conf.Suppress]
    return marked


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
        raise ValueError(" ".join(str(error).split())) from error  # which tyro reports as an error of this option


def _options(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the options and arguments of a function as they are typed, by the name of the value that they set."""
    options: dict[str, str] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        cls, *marks = get_args(hint) or (hint,)
        given = [mark for mark in marks if hasattr(mark, "metavar")]
        name = next((mark.name for mark in given if mark.name is not None), name)
        if is_dataclass(cls):
            options |= _settings(cls, name)
        else:
            options[name] = f"--{name.replace('_', '-')}"
            if Positionals in marks:
                options[name] = options[given[0].metavar.lower()] = f"the argument {given[0].metavar}"
    return options


def _settings(cls: Any, where: str = "") -> dict[str, str]:
    """Returns the options of a dataclass and of the dataclasses in it, by their dotted names and by short ones."""
    options: dict[str, str] = {}
    for name, hint in get_type_hints(cls).items():
        place = f"{where}.{name}".removeprefix(".")
        options[place] = "the argument CORPUS" if place == "data.corpus" else f"--{place.replace('_', '-')}"
        for alias in COMMON.get(cls.__name__, {}).get(name, ()):
            options[alias.lstrip("-").replace("-", "_")] = alias
        for section in (hint, *get_args(hint)):
            if is_dataclass(section) and section is not ClassConfig:
                options |= _settings(section, place)
    return options


def _name_here(arguments: Sequence[str], options: Mapping[str, str]) -> str:
    """Returns what to give for the first option or NAME=VALUE of another tool; empty if there is none."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        setting, equals, value = word.partition("=")
        is_unknown_path = equals and not (word.startswith("-") or before.startswith("-") or Path(word).exists())
        if not (here := name_here(setting, options)):
            if is_unknown_path and "config" in options and re.fullmatch(r"[+~]*[\w.]+", setting):
                return (
                    f"{word} is neither a path nor a setting of this command: settings are options, such as --seed 1."
                )
            continue
        is_option = options.get(setting[2:].replace("-", "_"), "").startswith("-")
        if word.startswith("--") and not is_option:
            return f"unknown option {setting}; here it is {' or '.join(options[each] for each in here)}."
        if is_unknown_path:
            if here == ["trainer.lightning"]:
                value = f"'{{{setting.rpartition('.')[2]}: {value}}}'"
            if options[here[0]].startswith("-"):
                given = " or ".join(f"{options[each]} {value}" for each in here)
                return f"{word} is not an argument: settings are options, such as {given}."
            return f"{word} is not an argument: give {value} as {options[here[0]]}."
    return ""


def _taken_as_value(arguments: Sequence[str], explanation: str) -> str:
    """Returns what to do if an option with several values has taken a path that follows them; empty if none has."""
    option, num_values = "", 0
    for word in arguments:
        if word.startswith("-"):
            option, num_values = word, 0
            continue
        num_values += 1
        is_refused = re.search(rf"Error parsing [^:]*{re.escape(option)}[/:]", explanation)
        if option and num_values > 1 and is_refused and Path(word).exists():
            return f"{word} is taken as a value of {option}: give it before the options."
    return ""
