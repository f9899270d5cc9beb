import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from nestcli import nestdata as nestdata_program
from nestcli import nestmodel as nestmodel_program
from nestcli.arguments.settings import SETTINGS
from nestcli.commands.preflight import PreflightTrainer
from nestcli.program import Command, Program
from nestdata import ConfigError, MixConfig, PlanConfig
from nestguard import GuardError
from nestmodel import CtcProbeConfig, ProbeConfig, WeightsError

PROGRAMS = {"nestdata": nestdata_program.PROGRAM, "nestmodel": nestmodel_program.PROGRAM}
# Commands whose arguments Typer parses, not Lightning.
OWN_COMMANDS = ["prepare", "pack", "verify", "plan", "sample-batch preview", "features", "probe", "import", "export"]
HEAVY = ("torch", "lhotse", "pytorch_lightning", "numpy", "matplotlib", "sklearn", "rich", "jsonargparse", "jiwer")

REPOSITORY = Path(__file__).parents[2]


def parameters(command: str) -> dict[str, Any]:
    """Returns the parameters of a command by long flag; arguments by metavar."""
    name, *subcommands = command.split()
    program = next(program for program in PROGRAMS.values() if name in program.commands)
    target = program.commands[name].load()
    if not isinstance(target, typer.Typer):
        app = typer.Typer()
        app.command()(target)
        target = app
    click_command: Any = get_command(target)
    for subcommand in subcommands:
        click_command = click_command.commands[subcommand]
    own = [parameter for parameter in click_command.params if "completion" not in parameter.name]
    return {(p.opts[0] if p.param_type_name == "option" else p.metavar): p for p in own if p.opts != ["--help"]}


def all_flags(command: str) -> list[str]:
    flags = []
    for name, parameter in parameters(command).items():
        flags.append(" ".join(sorted(parameter.opts)) if parameter.param_type_name == "option" else name)
    return sorted(flags)


def test_the_flags_of_all_commands_are_deliberate() -> None:
    assert {command: all_flags(command) for command in OWN_COMMANDS} == {
        "prepare": [
            *("--channel", "--dask", "--format", "--jobs -j", "--json", "--max-pause"),
            *("--max-seconds", "--max-segment-seconds", "--min-rate", "--min-seconds", "--min-segment-seconds"),
            *("--min-speech-share", "--output -o", "--overwrite", "--pcm", "--probe"),
            *("--report-samples", "--sampling-rate", "--segment", "--strict", "--tars", "--window-seconds", "INPUT"),
        ],
        "pack": [
            *("--codec", "--jobs -j", "--json", "--output -o", "--overwrite", "--shard-hours", "CORPUS"),
        ],
        "verify": [
            *("--accept-changed", "--decode", "--jobs -j", "--json", "--root", "--set-root"),
            "CORPUS",
        ],
        "plan": [
            *("--bucket-width", "--config -c", "--json", "--max-batch-seconds", "--max-cuts"),
            *("--microbatches-per-step",),
            *("--min-audio-seconds", "--num-shapes", "--picture", "--quadratic-seconds", "--seed"),
            *("--temperature", "--weights", "--world-size", "CORPUS"),
        ],
        "sample-batch preview": [
            *("--config -c", "--json", "--max-batch-seconds", "--microbatches-per-step"),
            *("--mix-prob", "--noise"),
            *("--output -o", "--rank", "--seed", "--step", "--world-size", "CORPUS"),
        ],
        "features": [
            *(
                "--context",
                "--device",
                "--dtype",
                "--format",
                "--json",
                "--layers",
                "--max-batch-seconds",
                "--output -o",
            ),
            *("--overwrite", "INPUT", "MODEL"),
        ],
        "probe": [
            *("--baselines", "--context", "--device", "--group-by", "--held-out"),
            *("--held-out-where", "--json", "--label"),
            *("--learning-rates", "--max-batch-seconds", "--max-epochs", "--output -o", "--overwrite"),
            *("--probe-seeds", "--seed", "--task", "--test", "--train-per-class"),
            *("INPUT", "MODEL"),
        ],
        "import": ["--output -o", "--overwrite", "MODEL"],
        "export": ["--context", "--output -o", "--overwrite", "--parts", "--to", "MODEL"],
    }
    assert list(signature(PreflightTrainer.preflight).parameters) == [
        *("self", "model", "datamodule", "num_batches", "timeout_s"),
        *("find_budget", "memory_limit", "memory_margin", "json"),
        *("ckpt_path", "weights_only"),
    ]


@pytest.mark.parametrize("flag", ["--json", "--overwrite", "--device"])
def test_a_shared_flag_has_the_same_help_in_every_command(flag: str) -> None:
    commands = {*OWN_COMMANDS} - ({"pack"} if flag == "--overwrite" else set())  # which deletes the old set first
    helps = {found[flag].help for command in commands if flag in (found := parameters(command))}
    assert len(helps) == 1


def test_a_setting_of_the_plan_is_in_the_table_or_only_in_files() -> None:
    """Mixtures of languages and over time are written in a file, and the seed is that of the run."""
    keys = {setting.key.removeprefix("data.plan.") for setting in SETTINGS}
    only_in_files = {"languages", "language_temperature", "stages", "seed"}
    assert {field.name for field in fields(PlanConfig)} - keys == only_in_files


@pytest.mark.parametrize("config", [ProbeConfig, CtcProbeConfig])
def test_the_options_of_a_probe_are_the_fields_of_its_configurations(config: type[Any]) -> None:
    """Options of some tasks are None by default, and their help names the tasks and defaults."""
    found = parameters("probe")
    for field in fields(config):
        option = found["--" + field.name.replace("_", "-")]
        shared = ("seed", "max_batch_seconds", "device")
        assert option.default == (field.default if field.name in shared else None), field.name
    assert found["--max-epochs"].help == "ctc: maximum number of epochs. [default: 30]"
    assert found["--learning-rates"].help.endswith(" [default: 0.005,0.02,0.08]")
    assert found["--held-out"].help.endswith(" [default: labels 0.25, ctc 0.1]")


def test_the_help_of_mix_prob_gives_its_default() -> None:
    assert parameters("sample-batch preview")["--mix-prob"].help.endswith(f"else {MixConfig().prob:g}]")


def test_messages_mention_only_flags_that_exist() -> None:
    known = {flag for command in OWN_COMMANDS for flags in all_flags(command) for flag in flags.split()}
    known |= {"--help", "--version", "--seed_everything", "--ckpt_path", *(setting.flag for setting in SETTINGS)}
    known |= {f"--{name}" for name in signature(PreflightTrainer.preflight).parameters}
    known |= {"--local-addr", "--master-addr", "--rdzv-backend", "--nnodes", "--nproc-per-node"}  # of torchrun
    known |= {"--nodes", "--ntasks-per-node", "--shm-size"}  # of srun and of Docker
    unknown = []
    for package in ("nestdata", "nestmodel"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            unknown += [
                (path.name, flag)
                for flag in re.findall(r"(?<![-\w])--[a-z][\w-]*(?![\w.-])", text)
                if flag not in known
            ]
    assert unknown == []


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(program: str, flag: str) -> None:
    source = f"""
import sys
from nestcli.{program} import main
assert main([{flag!r}]) == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "nestdata prepare",
        "nestdata plan",
        "nestdata sample-batch preview",
        "nestmodel features",
        "nestmodel probe",
        "nestmodel import",
        "nestmodel export",
    ],
)
def test_the_help_of_a_command_does_not_import_torch(command: str) -> None:
    program, *arguments = command.split()
    source = f"""
import sys
from nestcli.{program} import main
assert main([*{arguments}, "--help"]) == 0
print([name for name in ("torch", "lhotse", "numpy", "pytorch_lightning") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("program", PROGRAMS)
def test_version_is_that_of_the_distribution(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[program].run(["--version"]) == 0
    assert capsys.readouterr().out == f"{program} 0.1.0\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_lists_every_command_with_its_whole_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[program].run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, command in PROGRAMS[program].commands.items():
        assert f" {name} {command.help}" in shown


@pytest.mark.parametrize("command", OWN_COMMANDS)
def test_a_command_loads_and_shows_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = command.split()
    program = next(program for program in PROGRAMS.values() if name in program.commands)
    assert program.run([name, *rest, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: {program.name} {command} ")
    for flags in all_flags(command):
        assert all(flag in shown for flag in flags.split())


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("nestdata", ["prepar"], "No such command 'prepar'. Did you mean 'prepare'? See `nestdata --help`."),
        ("nestdata", ["sample-batch"], "Missing command. See `nestdata sample-batch --help`."),
        ("nestmodel", ["feature"], "No such command 'feature'. Did you mean 'features'? See `nestmodel --help`."),
        ("nestmodel", ["--verbose"], "No such option: --verbose. See `nestmodel --help`."),
    ],
)
def test_a_typo_is_one_line_with_the_nearest_name(
    program: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0].startswith("error: " + message.split(" See ")[0].rstrip("."))
    assert captured.err.count("\n") == 1


def failing(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


WORKER_MESSAGE = (
    "Caught ConfigError in worker 0.\nTraceback (most recent call last):\nnestdata.errors.ConfigError: gone"
)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("seed is 'x'"), 2, "seed is 'x'"),
        (ConfigError("two\n  lines"), 2, "two lines"),
        (ConfigError(WORKER_MESSAGE), 2, "gone"),
        (GuardError("no port"), 2, "no port"),
        (WeightsError("a.ckpt: gone"), 1, "a.ckpt: gone"),
        (typer.BadParameter("wrong"), 2, "Invalid value: wrong. See `tool fail --help`."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_becomes_an_exit_code_and_one_line(
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Command, "load", lambda _: failing(error))
    tool = Program(name="tool", help="", commands={"fail": Command("x:y", "Fail."), "other": Command("x:z", "")})
    assert tool.run(["fail"]) == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "load", lambda _: failing(ZeroDivisionError("a bug")))
    tool = Program(name="tool", help="", commands={"fail": Command("x:y", "Fail."), "other": Command("x:z", "")})
    with pytest.raises(ZeroDivisionError, match="a bug"):
        tool.run(["fail"])
