"""Completion by shells: what is offered, through the real bash, and that nothing that was typed is run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nestcli.arguments.completion import complete, complete_presets
from nestcli.arguments.settings import LIGHTNING_COMMANDS, settings_of
from nestmodel import preset_names

BASH = shutil.which("bash")
PROGRAM = Path(sys.executable).parent / "nestmodel"


def offered(*words: str, command: str = "fit") -> list[str]:
    """Returns the completions of the last word."""
    return [candidate.value for candidate in complete(command, words[:-1], words[-1])]


@pytest.mark.parametrize("command", LIGHTNING_COMMANDS)
def test_short_options_are_completed(command: str) -> None:
    options = [setting.flag for setting in settings_of(command) if setting.flag.startswith("--")]
    assert offered("speech.corpus", "--", command=command) == [*options, "--help", "--help-all", "--print-config"]
    assert "--max-batch-seconds" in offered("--max", command=command)


def test_keys_are_completed_in_either_spelling() -> None:
    assert "--trainer.max_steps" in offered("--trainer.")
    assert offered("--trainer.max_st") == ["--trainer.max_steps"]
    assert offered("--trainer.max-st") == ["--trainer.max-steps"]
    assert "--model.config.encoder.d_model" in offered("--model.")
    assert "--data.plan.num_shapes" in offered("--data.plan.")


@pytest.mark.parametrize(
    "words",
    [("--config", ""), ("-c", ""), ("a", "--config", ""), ("--config", "=", ""), ("--config", "demo", "-c", "")],
)
def test_presets_are_completed_after_config(words: tuple[str, ...]) -> None:
    assert offered(*words) == [*preset_names(), "streaming", "unified"]
    assert offered(*words[:-1], "x") == ["xlarge"]
    assert complete_presets("lar") == ["large"]


def test_values_and_corpora_are_left_to_the_shell() -> None:
    assert offered("") == offered("spee") == offered("--noise", "") == offered("--max-steps", "") == []
    assert offered("--quiet", "--noi") == ["--noise"]
    assert "wandb" in offered("--log", "")


def completed_by_bash(words: list[str], directory: Path) -> list[str]:
    """Returns what the real bash offers for the last word, with the installed script and program."""
    assert BASH is not None
    environment = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    script = subprocess.run(
        [PROGRAM],
        env={**environment, "_NESTMODEL_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    (directory / "completion.bash").write_text(script)
    source = """
        source completion.bash
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _nestmodel_completion nestmodel
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [BASH, "--norc", "-c", source, "bash", "nestmodel", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pre"], ["preflight", "presets"]),
        (["fit", "speech.corpus", "--max-t"], ["--max-time"]),
        (["fit", "--config", "me"], ["medium"]),
        (["presets", "x"], ["xlarge"]),
        (["features", "--lay"], ["--layers"]),
        (["fit", r"\$\(touch\ created\)", r"\;touch\ created", "--max-t"], ["--max-time"]),
        (["fit", "'$(touch created)", "--max-t"], [""]),
        (["fit", "--config", "$(touch created)"], [""]),
        (["fit", "*", "--noise", "; touch created"], [""]),
    ],
)
def test_bash_completes_and_runs_nothing_that_was_typed(words: list[str], expected: list[str], tmp_path: Path) -> None:
    for name in ("$(touch created)", ";touch created", "a b"):
        (tmp_path / name).touch()
    assert completed_by_bash(words, tmp_path) == expected
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str) -> None:
    environment = {**os.environ, "_NESTMODEL_COMPLETE": f"source_{shell}"}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert f"_NESTMODEL_COMPLETE=complete_{shell}" in done.stdout


def test_completion_imports_neither_torch_nor_lightning() -> None:
    source = """
import json, os, sys
os.environ |= {"_NESTMODEL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
os.environ["_TYPER_COMPLETE_ARGS"] = "nestmodel fit --max-t"
from nestcli.nestmodel import main
try:
    main([])
except SystemExit:
    print(json.dumps([name for name in ("torch", "lhotse", "numpy", "pytorch_lightning") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    *offers, imported = done.stdout.splitlines()
    assert offers == ["--max-time\tLongest time, as DD:HH:MM:SS."]
    assert json.loads(imported) == []
