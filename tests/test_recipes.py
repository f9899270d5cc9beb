"""Runs the programs in recipes/ on small data, and compares their pages with what they print."""

import hashlib
import io
import json
import re
import shlex
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from benchmarks.librispeech_layout import OTHERS, TRAIN, read_groups, write_layout
from nestcli.nestdata import main as nestdata
from nestcli.nestmodel import main as nestmodel
from nestmodel import NestConfig, NestModel, RunConfig
from nestmodel.formats.nemo_archive import write_nemo
from tests.extras import needs
from tests.scripts import load_script

REPOSITORY = Path(__file__).parents[1]
LIBRISPEECH = REPOSITORY / "recipes" / "librispeech"
TINY_ENCODER = {"d_model": 32, "num_heads": 2, "num_layers": 2, "subsampling_channels": 8}
TINY_FINETUNE = "--vocabulary 1 --steps 3 --warmup-steps 1 --freeze-steps 1 --batch-seconds 20 --save-steps 3"


@pytest.fixture(scope="module")
def librispeech() -> ModuleType:
    return load_script(LIBRISPEECH / "run.py")


def write_demo_layout(directory: Path) -> None:
    """Writes the demo's speech in the layout of LibriSpeech: two or more speakers for each part."""
    speakers = read_groups(REPOSITORY / "manifests" / "demo" / "speech.json", "speaker")
    parts = {name: speakers[number::3] for number, name in enumerate(TRAIN)}
    write_layout(directory, parts | {name: speakers[number::4] for number, name in enumerate(OTHERS)})


def write_tiny_preset(path: Path) -> Path:
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "val_check_interval": 2}
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"config": {"encoder": TINY_ENCODER}}}))
    return path


@pytest.mark.slow
@needs("finetune", "accelerate", "jiwer", "transformers")
@pytest.mark.filterwarnings("ignore:::accelerate", "ignore:::huggingface_hub", "ignore:::transformers")
def test_the_recipe_for_librispeech_runs_from_the_unpacked_archives_to_error_rates(
    librispeech: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the recipe runs as printed, in this process, except the download."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "finetune_ctc")
    ran = []

    def run(command: list[str | Path]) -> None:
        name, *arguments = map(str, command)
        if name == "python":
            load_script(Path(arguments[0])).main(arguments[1:])
        else:
            assert {"nestdata": nestdata, "nestmodel": nestmodel}[name](arguments) == 0
        ran.append(name)

    monkeypatch.setattr(librispeech, "run", run)
    data, output = tmp_path / "data", tmp_path / "out"
    write_demo_layout(data)
    config = ["--config", "demo", str(write_tiny_preset(tmp_path / "tiny.yaml"))]
    stages = ["--stages", *librispeech.STAGES[1:]]
    librispeech.main([str(data), str(output), *config, *stages, "--finetune", TINY_FINETUNE])

    assert ran == ["python", "nestdata", "nestdata", "nestmodel", "nestmodel", "python", "python"]
    scores = json.loads((output / "scores" / "scores.json").read_text())
    assert list(scores) == list(librispeech.SCORED)
    assert {name: len(score) for name, score in scores.items()} == dict.fromkeys(librispeech.SCORED, 3)
    assert all(0 < score["words"]["rate"] for score in scores.values())
    num_lines = {name: len((output / "scores" / f"{name}.jsonl").read_text().splitlines()) for name in scores}
    assert num_lines == {name: score["num_test"] for name, score in scores.items()}
    assert sum(num_lines.values()) == 40
    dev_other = json.loads((output / "recogniser" / "results.json").read_text())
    assert dev_other["characters"] == scores["dev-other"]["characters"]


@pytest.mark.parametrize(("num_gpus", "num_microbatches"), [(1, 16), (8, 16), (64, 64)])
def test_every_configuration_has_the_same_audio_in_a_step(num_gpus: int, num_microbatches: int) -> None:
    plan = RunConfig.read(["large", LIBRISPEECH / f"gpus_{num_gpus}.yaml"]).data.plan
    assert plan.microbatches_per_step == num_microbatches
    assert plan.microbatches_per_step * plan.max_batch_seconds == 32_000
    assert plan.microbatches_per_step % num_gpus == 0


def test_an_archive_with_another_digest_is_not_unpacked(tmp_path: Path) -> None:
    archive, download = tmp_path / "dev-clean.tar.gz", load_script(LIBRISPEECH / "download.py")
    write_archive(archive, {"LibriSpeech/README.TXT": b"text"})
    with pytest.raises(SystemExit, match=r"dev-clean\.tar\.gz: SHA-256 is .* Remove the file and download it again"):
        download.unpack(archive, "0" * 64, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dev-clean.tar.gz"]


def test_the_members_of_an_archive_stay_in_the_folder(tmp_path: Path) -> None:
    archive, download = tmp_path / "a.tar.gz", load_script(LIBRISPEECH / "download.py")
    write_archive(archive, {"../outside": b""})
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(tarfile.FilterError):
        download.unpack(archive, digest, tmp_path / "in")
    assert not (tmp_path / "outside").exists()


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.slow
def test_the_commands_of_continued_pretraining_start_from_the_weights_and_replay_old_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the page runs as it is, with a smaller model and fewer steps."""
    page = (REPOSITORY / "recipes" / "continued_pretraining" / "README.md").read_text(encoding="utf-8")
    block = page.partition("```sh\n")[2].partition("```")[0]
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").replace("--lr 0.5", "--lr 1e-9").splitlines()]
    demo = REPOSITORY / "manifests" / "demo"
    for folder, pattern in (("new_audio", "speech/nl*"), ("old_audio", "speech/en*"), ("noise", "noise/brown*")):
        (tmp_path / folder).mkdir()
        for path in demo.glob(f"{pattern}.flac"):
            shutil.copy(path, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    write_tiny_preset(tmp_path / "tiny.yaml")
    smaller = {"large": "demo", "20000": "2"}
    demo_config = NestConfig.preset("demo")
    start = NestModel(replace(demo_config, encoder=replace(demo_config.encoder, **TINY_ENCODER), seed=7))
    write_nemo(tmp_path / "start.nemo", start.config, start.state_dict())

    for program, *arguments in commands:
        tiny = ["--config", "tiny.yaml"] if arguments[0] == "fit" else []
        changed = [smaller.get(argument, argument) for argument in arguments] + tiny
        assert {"nestdata": nestdata, "nestmodel": nestmodel}[program](changed) == 0

    (checkpoint,) = (tmp_path / "runs" / "continued").rglob("last.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    assert content["nest_training"]["started with the weights of"] == "start.nemo"
    assert re.findall(r"\w+\.corpus", content["nest_training"]["speech"]) == ["new.corpus", "old.corpus"]
    assert content["nest_settings"]["data.plan.weights"] == "(0.5, 0.5)"
    assert content["global_step"] == 2
    for name, value in start.state_dict().items():
        if "running" not in name and value.is_floating_point():
            torch.testing.assert_close(content["state_dict"][name], value, rtol=0, atol=1e-6)  # steps of 1e-9
