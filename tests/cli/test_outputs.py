"""Every command that writes, with something of a user in its way: the files of users stay as they are."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nestcli.nestdata import main as nestdata
from nestcli.nestmodel import main as nestmodel
from nestdata.output import MARK
from nestmodel import NestNetwork, save_network
from tests.synthesis import hiss, write_audio, write_jsonl
from tests.training import tiny_config

PLAN = "--data.plan.microbatches-per-step 1"
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "prepare": (nestdata, "prepare speech.json -o OUT --min-seconds 0"),
    "prepare a folder": (nestdata, "prepare speech -o OUT --min-seconds 0 --probe decode --pcm"),
    "pack": (nestdata, "pack speech.corpus -o OUT"),
    "preview": (
        nestdata,
        f"sample-batch preview speech.corpus -o OUT --noise speech.corpus {PLAN}",
    ),
    "features": (nestmodel, "features model.ckpt speech.corpus -o OUT --device cpu"),
    "features of files": (nestmodel, "features model.ckpt speech.json -o OUT --device cpu"),
    "probe": (nestmodel, "probe label model.ckpt speech.json -o OUT --device cpu --label text"),
    "average": (nestmodel, "average model.ckpt other.ckpt -o OUT"),
    "import": (nestmodel, "import model.ckpt -o OUT"),
    **{name: (nestmodel, f"export model.ckpt --to {name} -o OUT") for name in ("nemo", "huggingface", "safetensors")},
}


def folder(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "diary.txt").write_text("precious")
    (path / "meta.json").write_text("{}")


def file(path: Path) -> None:
    path.write_text("precious")


def link_to_a_folder(path: Path) -> None:
    folder(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_to_a_file(path: Path) -> None:
    file(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def folder_with_the_mark_of_another(path: Path) -> None:
    folder(path)
    (path / MARK).write_text(json.dumps({"kind": "a file", "output": "another"}))


OBSTACLES = [
    *(
        (name, make)
        for name in ("", ".partial")
        for make in (folder, file, link_to_a_folder, link_to_a_file, link_to_nothing)
    ),
    (".partial", folder_with_the_mark_of_another),
    *((name, make) for name in (".md", ".data", ".rejected.jsonl", ".old", ".partial.old") for make in (folder, file)),
]
"""What is in the way, and where, relative to the name of the output."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    for name in ("model.ckpt", "other.ckpt"):
        save_network(NestNetwork(tiny_config()), directory / name)
    for number in range(6):
        write_audio(directory / "speech" / f"{number}.flac", hiss(16000 + 400 * number, number))
    rows = [{"audio_filepath": f"speech/{number}.flac", "text": "ab"[number % 2]} for number in range(6)]
    write_jsonl(directory / "speech.json", rows)
    assert nestdata(["prepare", f"{directory}/speech.json", "-o", f"{directory}/speech.corpus"]) == 0
    return directory


def found(directory: Path) -> dict[str, bytes | str]:
    """Returns what is at every path: the target of a link, the content of a file, or nothing for a folder."""
    content: dict[str, bytes | str] = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            content[name] = os.readlink(path)
        else:
            content[name] = path.read_bytes() if path.is_file() else ""
    return content


def attempt(command: str, obstacle: tuple[str, Callable[[Path], None]], *, overwrite: bool, directory: Path) -> None:
    """Runs a command in a folder with its inputs and an obstacle, and checks that nothing of a user is lost."""
    (suffix, make), (main, line) = obstacle, COMMANDS[command]
    make(directory / f"out{suffix}")
    before = found(directory)
    arguments = line.replace("OUT", "out").split()
    takes_overwrite = overwrite and command != "preview"
    code = main([*arguments, *(["--overwrite"] if takes_overwrite else [])])
    after = found(directory)
    is_asked_for = takes_overwrite and code == 0
    kept = {name: content for name, content in before.items() if not (is_asked_for and name in ("out", "out.md"))}
    assert {name: after.get(name) for name in kept} == kept
    if code:
        assert suffix not in (".old", ".partial.old", ".data"), "it is in nobody's way"
        assert after == before


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_a_user_is_lost(command: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestdata.batch.preview._draw", lambda *_: None)  # pictures take most of the time
    draw = random.Random(command)
    every = [(obstacle, overwrite) for obstacle in OBSTACLES for overwrite in (False, True)]
    for number, (obstacle, overwrite) in enumerate(draw.sample(every, 5)):
        directory = shutil.copytree(inputs, tmp_path / str(number))
        monkeypatch.chdir(directory)
        attempt(command, obstacle, overwrite=overwrite, directory=directory)
