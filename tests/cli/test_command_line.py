"""The grammar of both programs: options, files, mistakes, help and completion."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml

from nestcli import nestdata as nestdata_program
from nestcli import nestmodel as nestmodel_program
from nestcli.commands.presets import FIGURES
from nestcli.program import Command, Program
from nestdata import ConfigError
from nestguard import GuardError
from nestmodel import (
    ClassConfig,
    EncoderConfig,
    NestConfig,
    NestNetwork,
    RunConfig,
    WeightsError,
    preset_names,
    preset_path,
)
from nestmodel.config_files import LIVE_PRESETS
from tests.cli.commands import error_of, mistake_of, run
from tests.conftest import MessyCorpora
from tests.synthesis import hiss, write_audio
from tests.terminal import Terminal
from tests.training import TINY

PROGRAMS = {"nestdata": nestdata_program.PROGRAM, "nestmodel": nestmodel_program.PROGRAM}
COMMANDS = [(program, name) for program in PROGRAMS for name in PROGRAMS[program].commands if name != "probe"]
FROM_THE_SEED = {"data.plan.seed", "model.config.seed"}


def shown_by(program: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert PROGRAMS[program].run(arguments) == 0
    return capsys.readouterr().out


def parsed(*words: object) -> RunConfig:
    """Returns the settings of a command line of `fit`."""
    seen: list[RunConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nestcli.commands.fit.print_settings", seen.append)
        assert PROGRAMS["nestmodel"].run(["fit", *map(str, words), "--print-config"]) == 0
    (config,) = seen
    return config


def settings(cls: type, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted names of the settings below a dataclass, with their types."""
    for name, hint in get_type_hints(cls).items():
        dotted = f"{where}.{name}".removeprefix(".")
        # The encoder has the sizes of FastConformer, or a class in a file: presets have the first.
        hint = EncoderConfig if hint == EncoderConfig | ClassConfig else hint
        if is_dataclass(hint) and isinstance(hint, type):
            yield from settings(hint, dotted)
        else:
            yield dotted, hint


def test_every_setting_of_a_run_is_an_option_except_the_seeds_that_follow(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("nestmodel", ["fit", "--help-all"], capsys)
    options = set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*", shown))
    names = {name for name, _ in settings(RunConfig)}
    options |= {option.replace("no-", "", 1) for option in options}  # of a value that is true
    missing = {name for name in names if f"--{name.replace('_', '-')}" not in options}
    assert missing == FROM_THE_SEED | {"data.corpus"}  # corpora are arguments
    assert "CORPUS" in shown


@pytest.mark.parametrize("program", ["plan", "sample-batch preview"])
def test_the_settings_of_data_have_the_same_names_in_every_command(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_options = set(re.findall(r"--data[\w.-]*", shown_by("nestmodel", ["fit", "--help-all"], capsys)))
    options = set(re.findall(r"--data[\w.-]*", shown_by("nestdata", [*program.split(), "--help-all"], capsys)))
    expected = {name for name in run_options if program != "plan" or name.startswith("--data.plan")}
    assert options == expected


@pytest.mark.parametrize(
    ("short", "dotted", "value"),
    [
        ("--noise", "--data.noise", "a"),
        ("--lr", "--model.config.optimizer.lr", "0.5"),
        ("--max-time", "--trainer.max-time", "7h"),
        ("-o", "--output", "out"),
    ],
)
def test_a_short_name_is_another_name_of_the_dotted_one(short: str, dotted: str, value: str) -> None:
    by_short, by_dotted = (parsed("a.corpus", "-c", "demo", name, value) for name in (short, dotted))
    assert by_short == by_dotted != parsed("a.corpus", "-c", "demo")


def test_options_override_files_wherever_they_stand(tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("{trainer: {max_steps: 5, log_every_n_steps: 4}, data: {corpus: file.corpus}, seed: 2}")
    expected = RunConfig.read(["demo", later])
    expected = replace(expected, trainer=replace(expected.trainer, max_steps=9), seed=3)
    options = ("--max-steps", 9, "--seed", 3)
    assert parsed(*options, "-c", "demo", "--config", later) == expected
    assert parsed("-c", "demo", *options, f"--config={later}") == expected
    named = parsed("a.corpus", "b.corpus", "--config", "demo", *options, "-c", later)
    assert named == replace(expected, data=replace(expected.data, corpus=(Path("a.corpus"), Path("b.corpus"))))
    assert parsed("--config", "demo", "-c", later, "a.corpus", *options).data.corpora == (Path("a.corpus"),)


def test_lists_are_words_and_nested_values_are_yaml() -> None:
    config = parsed(
        *"a b -c demo --weights 0.7 0.3 --log csv --log wandb --data.mix.noise-snr-db 1 2".split(),
        *("--trainer.lightning", "{limit_val_batches: 3}", "--data.augment.speech", "[PolarityInversion]"),
        *("--trainer.callbacks", "[{class_path: a.B, init_args: {c: 1}}]", "--trainer.strategy", "ddp"),
        *("--data.plan.stages", "[{from_step: 2, weights: [1, 2]}]", "--devices", "auto"),
    )
    assert (config.data.plan.weights, config.log) == ((0.7, 0.3), ("csv", "wandb"))
    assert parsed("a", "-c", "demo").log == ()
    assert config.data.mix.noise_snr_db == (1.0, 2.0)
    assert config.trainer.lightning == {"limit_val_batches": 3}
    assert list(config.data.augment.speech) == ["PolarityInversion"]
    assert (config.trainer.callbacks[0].class_path, config.trainer.callbacks[0].init_args) == ("a.B", {"c": 1})
    assert (config.trainer.strategy, config.trainer.devices) == ("ddp", "auto")
    assert config.data.plan.stages[0].weights == (1.0, 2.0)


def test_the_printed_settings_are_read_as_they_were_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["a.corpus", "-c", "small", "--max-steps", "3", "--weights", "1", "--data.bad-audio.min-count", "4"]
    printed = tmp_path / "run.yaml"
    printed.write_text(shown_by("nestmodel", ["fit", *words, "--print-config"], capsys))
    assert RunConfig.read([printed]) == parsed(*words)


def test_a_mistake_is_explained_on_a_terminal_as_well(tmp_path: Path) -> None:
    terminal = Terminal(columns=120)
    environment = {**os.environ, "TERM": "xterm-256color"}
    code = terminal.run(
        [Path(sys.executable).parent / "nestmodel", *"fit x -c demo --lrr 3".split()], tmp_path, environment
    )
    *explanation, line = terminal.lines()
    terminal.close()
    assert (code, line) == (2, "error: the command line is invalid. See `nestmodel fit --help-all`.")
    assert any("--lrr" in row for row in explanation)
    assert any("--lr, --model.config.optimizer.lr" in row for row in explanation)


def test_secrets_in_a_wrong_command_line_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"https://host/{'long/' * 40}a.tar?X-Amz-Signature=hunter2"
    assert PROGRAMS["nestmodel"].run(["import", "a.nemo", url]) == 2
    assert "hunter2" not in "".join(row.strip("│ ") for row in mistake_of(capsys).splitlines())


def test_what_a_command_line_shows_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    source = """
import sys
from nestcli.nestmodel import main
assert main(["fit", "gone.corpus", "-c", "demo"]) == 2
print([name for name in ("torch", "pytorch_lightning", "lhotse") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_the_help_of_every_command_imports_neither_torch_nor_lightning_nor_lhotse() -> None:
    source = f"""
import contextlib, importlib, io, sys
for program, name in {[(program, name) for program, name in COMMANDS if name != "preflight"]}:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = importlib.import_module("nestcli." + program).main([*name.split(), "--help"])
    loaded = [heavy for heavy in ("torch", "pytorch_lightning", "lhotse") if heavy in sys.modules]
    if code != 0 or loaded or name not in shown.getvalue():
        sys.exit(f"{{program}} {{name}} --help: exit code {{code}}, imports {{loaded}}")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_gets_no_traceback(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "nestmodel"
    done = subprocess.run(
        ["bash", "-c", f"{command} fit --help-all | head -1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("streams", "code", "error"),
    [
        ("<&-", 0, ""), (">&-", 0, ""), ("<&- >&-", 0, ""), ("2>&-", 0, ""), ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "error: No space left on device. Make space where the output goes, where it is printed to, "
         "and in the folder for temporary files (TMPDIR), and run the command again.\n"),
    ],
)  # fmt: skip
def test_a_command_runs_without_streams_and_says_that_they_are_full(
    tmp_path: Path, streams: str, code: int, error: str
) -> None:
    write_audio(tmp_path / "a é.wav", hiss(16000, 1))
    command = f"PYTHONIOENCODING=ascii {Path(sys.executable).parent / 'nestdata'} prepare 'a é.wav' -o 'é.corpus'"
    done = subprocess.run(["bash", "-c", f"{command} {streams}"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, error)
    assert (tmp_path / "é.corpus" / "meta.json").exists()
    if not streams.startswith((">", "<&- >")):
        assert r"read as audio" in done.stdout


def test_a_completion_script_for_bash_names_commands_and_options(tmp_path: Path) -> None:
    outcome = run("nestdata", "--print-completion", "bash", cwd=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    for name in PROGRAMS["nestdata"].commands:
        assert name.split()[0] in outcome.out
    assert "--max-batch-seconds" in outcome.out
    subprocess.run(["bash", "-n"], input=outcome.out, text=True, check=True)
    assert run("nestdata", "--print-completion", "fish", cwd=tmp_path).code == 2


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_no_option_is_taken_for_one_of_another_tool(
    program: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_by(program, [*name.split(), "--help-all"], capsys)
    words = set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*", shown))
    assert "--help" in words
    assert PROGRAMS[program].run([*name.split(), "--help", *sorted(words - {"--config"})]) == 0


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_examples_are_in_the_help_and_can_be_parsed(
    program: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = PROGRAMS[program].commands[name]
    shown = shown_by(program, [*name.split(), "-h"], capsys)
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "runs/small/version_0/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(preset_path("small").read_text())
    (tmp_path / "run.yaml").write_text("{}")
    called: list[dict[str, Any]] = []
    target = command.load()
    load_nothing = lambda _: wraps(target)(lambda **values: called.append(values))  # noqa: E731

    for example in command.examples:
        assert all(f"{line}\n" in shown for line in example.splitlines())
        words = shlex.split(example.partition(">")[0].replace("\\\n", " "))
        assert words[: 1 + name.count(" ") + 1] == [program, *name.split()]
        with monkeypatch.context() as patch:
            patch.setattr(Command, "load", load_nothing)
            assert PROGRAMS[program].run(words[1:]) == 0
    assert len(called) == len(command.examples) > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_command_the_help_is_on_stderr_and_the_code_2(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].run([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", shown_by(program, ["-h"], capsys))
    for name, command in PROGRAMS[program].commands.items():
        assert re.search(rf"  {name} +{re.escape(command.help)}\n", captured.err)


@pytest.mark.parametrize(
    ("program", "name", "meant"),
    [
        ("nestmodel", "trian", "fit"),
        ("nestmodel", "prepare", "nestdata prepare"),
        ("nestdata", "preview", "sample-batch preview"),
    ],
)
def test_a_mistyped_command_suggests_one(
    program: str, name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].run([name, "--help"]) == 2
    assert f"'{name}'. Did you mean '{meant}'?" in error_of(capsys)
    for other in PROGRAMS[program].other_names.values():
        first, *rest = other.split(maxsplit=1)
        assert (rest[0] in PROGRAMS[first].commands) if first in PROGRAMS else (other in PROGRAMS[program].commands)


WORKER_MESSAGE = (
    "Caught ConfigError in worker 0.\nTraceback (most recent call last):\nnestdata.errors.ConfigError: gone"
)


def failing(error: BaseException) -> Program:
    def command() -> None:
        raise error

    class Failing(Command):
        def load(self) -> Callable[..., Any]:
            return command

    return Program(name="tool", help="", commands={"fail": Failing("x:y", "Fail.")})


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("seed is 'x'"), 2, "seed is 'x'"),
        (ConfigError("two\n  lines"), 2, "two lines"),
        (ConfigError(WORKER_MESSAGE), 2, "gone"),
        (GuardError("no port"), 2, "no port"),
        (WeightsError("a.ckpt: gone"), 1, "a.ckpt: gone"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_becomes_an_exit_code_and_one_line(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error).run(["fail"]) == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        failing(ZeroDivisionError("a bug")).run(["fail"])


def test_presets_are_compared_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("nestmodel", ["presets"], capsys)
    assert sorted(FIGURES) == preset_names()
    assert re.search(r"^large +113 M +512 x 17 +80 ms +32,000 s +711,111 h$", shown, re.MULTILINE)
    assert re.search(r"^demo +2\.2 M +144 x 4 +40 ms +40 s +7 h$", shown, re.MULTILINE)
    assert re.search(r"^70,13 +5\.6 s +1\.12 s +1\.05 s +1,056 ms +25 % +12\.5 %$", shown, re.MULTILINE)
    # The times of a context are the same in both presets for live speech.
    one, other = (NestConfig.preset("small", preset) for preset in LIVE_PRESETS)
    in_one = replace(one, encoder=one.encoder.with_context((70, 6)))
    assert in_one == replace(other, encoder=other.encoder.with_context((70, 6)))


@pytest.mark.parametrize("preset", FIGURES)
def test_the_parameters_of_a_preset_are_counted(preset: str) -> None:
    with torch.device("meta"):
        network = NestNetwork(NestConfig.preset(preset))
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    assert f"{millions:.{1 if millions < 10 else 0}f}" == f"{FIGURES[preset].parameters:g}"


def test_a_preset_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("nestmodel", ["presets", "large"], capsys)
    assert shown == preset_path("large").read_text(encoding="utf-8")
    assert yaml.safe_load(shown)["trainer"]["max_steps"] == 80000
    assert PROGRAMS["nestmodel"].run(["presets", "larg"]) == 2
    assert "the nearest is 'large'" in error_of(capsys)


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    nestdata = Path(sys.executable).parent / "nestdata"
    command = f"cd gone && rmdir ../gone && {nestdata} prepare {tmp_path}/a.json -o x.corpus"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("shell-init")]
    assert (done.returncode, lines) == (1, ["error: the working directory was deleted. Change to one that exists."])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_port_that_is_in_use_is_one_line(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [messy_corpora.speech, "--config", "tiny.yaml", "-o", "run", "--accelerator", "cpu", "--devices", "2"]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [Path(sys.executable).parent / "nestmodel", "fit", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert f"error: port {port} is in use" in done.stderr
    assert "Traceback" not in done.stderr.partition("stall guard")[0]
