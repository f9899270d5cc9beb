"""Help, examples and presets: what a person reads before the first run."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from typer.main import get_command

from nestcli import nestdata as nestdata_program
from nestcli import nestmodel as nestmodel_program
from nestcli.arguments.dialect import translate
from nestcli.arguments.settings import GROUPS, LIGHTNING_COMMANDS, SETTINGS, Setting, settings_of
from nestcli.commands.presets import FIGURES
from nestcli.program import Program
from nestmodel import NestConfig, NestNetwork, preset_names, preset_path
from nestmodel.config import LIVE_PRESETS
from tests.cli.parsers import lightning_parsers

PROGRAMS = {"nestdata": nestdata_program.PROGRAM, "nestmodel": nestmodel_program.PROGRAM}
COMMANDS = [(program, name) for program in PROGRAMS for name in PROGRAMS[program].commands]
REPOSITORY = Path(__file__).parents[2]


def shown_by(program: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert PROGRAMS[program].run(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", LIGHTNING_COMMANDS)
def test_the_short_help_is_a_page_with_a_line_for_each_setting(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown_by("nestmodel", [command, "--max-steps", flag], capsys).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    for setting in settings_of(command):
        if setting.is_rare:
            assert setting.flag in "\n".join(lines)
        else:
            (line,) = [line for line in lines if re.match(rf"  (-\w, )?{setting.flag}\b[^-]", line)]
            assert setting.help.removesuffix(".") in line
    groups = [line.removesuffix(":") for line in lines if line.removesuffix(":") in GROUPS]
    assert groups == [group for group in GROUPS if any(setting.group == group for setting in settings_of(command))]
    assert "  --help-all" in "\n".join(lines)


def test_the_short_help_shows_the_values_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown_by("nestmodel", ["fit", "-h"], capsys)
    assert "ranks [config]\n" in plain
    assert "decides" not in plain
    for arguments in (["-c", "large"], ["--config=large"]):
        shown = shown_by("nestmodel", ["fit", *arguments, "-h"], capsys)
        assert "included [2000]\n" in shown
        assert "[80000]" in shown
    assert PROGRAMS["nestmodel"].run(["fit", "--config", "larg", "-h"]) != 0


def test_help_all_describes_every_setting_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from jsonargparse._common import parsing_settings

    for name in list(parsing_settings):
        monkeypatch.setitem(parsing_settings, name, parsing_settings[name])
    parsers = lightning_parsers(["fit", "--help"])
    for option, action in parsers["fit"]._option_string_actions.items():
        assert action.help, option
    assert translate(["fit", "--help-all", "x"]) == ["fit", "--help"]


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_examples_are_in_the_help_and_can_be_parsed(
    program: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = PROGRAMS[program].commands[name]
    shown = shown_by(program, [name, "-h"], capsys)
    assert command.examples
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/small/version_0").mkdir(parents=True)
    (tmp_path / "runs/small/version_0/config.yaml").write_text("{model: {}, data: {corpus: a}}")
    for example in command.examples:
        for line in example.splitlines():
            assert f"  {line}\n" in shown
            assert len(line) <= 78
        words = shlex.split(example.partition(">")[0].replace("\\\n", " "))
        assert words[:2] == [program, name]
        if command.is_lightning:
            assert translate(words[1:])
            continue
        target = command.load()
        if not isinstance(target, typer.Typer):
            app = typer.Typer()
            app.command()(target)
            target = app
        get_command(target).make_context(name, words[2:])


def test_the_help_of_a_subcommand_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  nestdata sample-batch preview " in shown_by("nestdata", ["sample-batch", "preview", "-h"], capsys)


@pytest.mark.parametrize("command", [*(f"nestmodel {name} -h" for name in LIGHTNING_COMMANDS), "nestmodel presets"])
def test_help_and_presets_import_neither_torch_nor_lightning(command: str) -> None:
    program, *arguments = command.split()
    source = f"""
import sys
from nestcli.{program} import main
assert main({arguments}) == 0
print([name for name in ("torch", "lhotse", "numpy", "pytorch_lightning", "jsonargparse") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_command_the_help_is_on_stderr_and_the_code_2(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == shown_by(program, ["-h"], capsys)


@pytest.mark.parametrize(
    ("program", "name", "meant"),
    [
        ("nestmodel", "trian", "fit"),
        ("nestmodel", "validat", "validate"),
        ("nestmodel", "prepare", "nestdata prepare"),
        ("nestdata", "preview", "sample-batch preview"),
        ("nestdata", "fit", "nestmodel fit"),
    ],
)
def test_a_mistyped_command_suggests_one(
    program: str, name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].run([name, "--help"]) == 2
    expected = f"error: No such command '{name}'. Did you mean '{meant}'? See `{program} --help`.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_names_lead_to_commands(program: str) -> None:
    for meant in PROGRAMS[program].other_names.values():
        *others, name = meant.removesuffix(" preview").split()
        assert name in PROGRAMS[others[0] if others else program].commands


def test_presets_are_compared_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("nestmodel", ["presets"], capsys)
    assert max(map(len, shown.splitlines())) <= 80
    assert sorted(FIGURES) == preset_names()
    assert re.search(r"^large +113 M +512 x 17 +80 ms +16,000 s +355,556 h$", shown, re.MULTILINE)
    assert re.search(r"^demo +2\.2 M +144 x 4 +40 ms +40 s +7 h$", shown, re.MULTILINE)


def test_attention_contexts_of_presets_are_listed_with_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.sub(" +", " ", shown_by("nestmodel", ["presets"], capsys))
    assert """
context left chunk look-ahead delay streaming unified
70,13 5.6 s 1.12 s 1.05 s 1,056 ms 25 % 12.5 %
70,6 5.6 s 0.56 s 0.49 s 496 ms 25 % 12.5 %
70,1 5.6 s 0.16 s 0.09 s 96 ms 25 % 12.5 %
70,0 5.6 s 0.08 s 0.01 s 16 ms 25 % 12.5 %
-1,-1 utterance - - - 0 % 50 %
""" in re.sub(" +$", "", shown, flags=re.MULTILINE)
    # The times of a context are the same in both.
    one, other = (NestConfig.preset("small", preset) for preset in LIVE_PRESETS)
    in_one = replace(one, encoder=one.encoder.with_context((70, 6)))
    assert in_one == replace(other, encoder=other.encoder.with_context((70, 6)))


@pytest.mark.parametrize("preset", FIGURES)
def test_the_figures_of_a_preset_are_counted_and_measured_ones(preset: str) -> None:
    figures = FIGURES[preset]
    with torch.device("meta"):
        network = NestNetwork(NestConfig.preset(preset))
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    assert f"{millions:.{1 if millions < 10 else 0}f}" == f"{figures.parameters:g}"
    if figures.budgets is None:
        return
    measured = (REPOSITORY / "benchmarks/results/gpu_h100_2026-11.md").read_text(encoding="utf-8")
    cells = next(line for line in measured.splitlines() if re.match(rf"\| {preset}, \d+ x 15 s, eager ", line)).split(
        "|"
    )
    assert (int(cells[5]), float(cells[6])) == (figures.audio_s_per_s, figures.memory_gb)
    assert f"| {preset} | no | " + " | ".join(f"{budget:,}" for budget in figures.budgets) in re.sub(
        r" / [\d,]+", "", (REPOSITORY / "docs/gpu.md").read_text(encoding="utf-8")
    )


def test_a_preset_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by("nestmodel", ["presets", "streaming"], capsys)
    assert yaml.safe_load(shown)["model"]["config"]["encoder"]["att_context_size"][0] == [70, 13]
    shown = shown_by("nestmodel", ["presets", "large"], capsys)
    assert shown == preset_path("large").read_text(encoding="utf-8")
    assert yaml.safe_load(shown)["trainer"]["max_steps"] == 80000
    assert PROGRAMS["nestmodel"].run(["presets", "larg"]) != 0
    assert "the nearest is 'large'" in capsys.readouterr().err


def test_plan_takes_keys_as_fit_does(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--data.plan.max_batch_seconds", "--data.plan.max-batch-seconds", "--max_batch_seconds"):
        assert PROGRAMS["nestdata"].run(["plan", "gone.corpus", option, "0"]) != 0
        assert "plan.max_batch_seconds is 0" in capsys.readouterr().err


def test_every_setting_of_the_plan_is_an_option_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(shown_by("nestdata", ["plan", "-h"], capsys).split())
    for setting in SETTINGS:
        if setting.key.startswith("data.plan."):
            assert f"{setting.flag} " in shown
            assert setting.help in shown


def test_nothing_is_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    parser: Any = lightning_parsers()["fit"]
    assert not parser.allow_abbrev
    program: Program = PROGRAMS["nestdata"]
    assert program.run(["plan", "a", "--conf", "demo"]) == 2
    assert "--config" in capsys.readouterr().err


def test_the_page_of_the_command_line_lists_every_setting() -> None:
    page = (REPOSITORY / "docs/command-line.md").read_text(encoding="utf-8")
    table = "\n".join(["| option | key | default | |", "|---|---|---|---|", *map(row_of, SETTINGS)])
    assert table in page, table


def row_of(setting: Setting) -> str:
    letter = f", `-{setting.letter}`" if setting.letter else ""
    key = f"`{setting.key}{f' {setting.value}' if setting.value else ''}`"
    default = f"{setting.default_text}{' (1)' if setting.in_presets else ''}".strip()
    return f"| `{setting.flag}`{letter} | {key} | {default} | {setting.help} |"
