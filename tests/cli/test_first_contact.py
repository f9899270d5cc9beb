"""What a newcomer types, right and wrong: each line has its exit code and the line that decides.

Mistakes that the tests of a single command have are not repeated here.
"""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nestcli import nestdata, nestmodel
from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer, prepare_corpus
from nestmodel import NestNetwork
from tests.synthesis import chirp, hiss, write_audio
from tests.training import tiny_config

PROGRAMS = {"nestdata": nestdata.main, "nestmodel": nestmodel.main}
NUM_CUTS = 8

LINES = (
    ("nestmodel train --config demo", 2, "error: No such command 'train'. Did you mean 'fit'?..."),
    ("nestmodel --version", 0, "nestmodel 0.1.0"),
    ("nestdata prepare talks", 0, "talks.corpus: 8 cuts, 0.00 h, 1.00 to 1.70 s"),
    ("nestdata prepare talks/0.flac -o one.corpus", 0, "one.corpus: 1 cuts, 0.00 h, 1.00 to 1.00 s"),
    ("nestdata prepare speech.csv", 0, "speech.corpus: 8 cuts, 0.00 h, 1.00 to 1.70 s"),
    ("nestdata prepare list.txt", 0, "list.corpus: 8 cuts, 0.00 h, 1.00 to 1.70 s"),
    ("nestdata prepare ready.corpus -o my.corpus", 0, "my.corpus: 8 cuts, 0.00 h, 1.00 to 1.70 s"),
    ("nestdata prepare talks -o ready.corpus", 1, "error: ready.corpus: exists already...--overwrite..."),
    ("nestdata prepare empty.json", 1, "error: empty.json: the manifest is empty. Check the command that wrote it."),
    ("nestdata prepare pages", 1, "error: pages: no audio in this folder...of other kinds: 1 .html. ..."),
    ("nestdata prepare broken", 1, "error: broken: no usable cut among 1 entries (1 unreadable); ...broken/0.wav: ..."),
    ("nestdata prepare hostile", 0, "hostile.corpus: 4 cuts, 0.00 h, 1.00 to 1.00 s"),
    ("nestdata verify ready.corpus", 0, "ready.corpus: ..."),
    ("nestdata pack ready.corpus -o packed", 0, "packed: 8 cuts, 0.00 h, 1 shards, ... GB"),
    (
        "nestdata plan speech.csv",
        1,
        "error: speech.csv: is a manifest, not a corpus. Run `nestdata prepare ...",
    ),
    (
        "nestdata plan ready.corpus --max-batch-seconds 1.2",
        1,
        "error: ready.corpus: 5 of 8 cuts, with ... % of the audio, are longer than plan.max_batch_seconds ...",
    ),
    (
        "nestdata sample-batch preview ready.corpus --noise ready.corpus -o pages",
        1,
        "error: pages: exists already and is not a preview. Choose another path.",
    ),
    ("nestmodel fit speech.csv --config demo", 2, "error: speech.csv: is a manifest, not a corpus. ..."),
    ("nestmodel features talks last.ckpt -o my.features", 1, "error: talks: is a folder, not a model. ..."),
    ("nestmodel features runs/a ready.corpus -o f", 1, "error: runs/a: ...newest checkpoint, runs/a/version_0/..."),
    ("nestmodel features ready.corpus talks -o f", 1, "error: ready.corpus: is a corpus, not a model. ..."),
    ("nestmodel average 'runs/a/version_0/checkpoints/*.ckpt' -o m.ckpt", 1, "error: ...Leave out the quotes..."),
    ("nestmodel export runs/b --to nemo", 1, "error: runs/b: ...no 'b' in ... Check the path. ..."),
    ("nestmodel fit ready.corpus -c demo --init-from runs", 1, "error: runs: ...newest checkpoint, runs/a/..."),
    ("nestmodel fit ready.corpus -c demo --init-from facebook/wav2vec2", 1, "error: ...hf://facebook/wav2vec2."),
    ("nestmodel fit ready.corpus -c demo --ckpt-path runs/a", 2, "error: ...newest checkpoint, runs/a/version_0/..."),
    ("nestmodel fit ready.corpus -c runs/a", 2, "error: runs/a: ...its settings, runs/a/version_0/config.yaml."),
    ("nestmodel fit runs/a -c demo", 2, "error: runs/a: is the folder of a run, not a corpus. ..."),
    ("nestmodel fit ready.json -c demo", 2, "error: ready.json: is a manifest, not a corpus. Give ready.corpus."),
    ("nestdata plan ready.corpu", 1, "error: ready.corpu: ...the nearest is 'ready.corpus'. ..."),
    ("nestdata prepare 'talks/*.flac' -o f.corpus", 1, "error: ...Leave out the quotes...the 8 paths..."),
    ("nestdata prepare runs -o f.corpus", 1, "error: runs: is the folder of a run, not audio. ..."),
    ("nestdata prepare talks -o f.corpus --num-workers 2", 2, "error: ...--jobs..."),
    ("nestdata prepare talks -o f.corpus --max-duration 20", 2, "error: ...--max-seconds..."),
    ("nestmodel fit ready.corpus -c demo --learning-rate 0.1", 2, "error: ...here it is --lr..."),
    ("nestmodel fit ready.corpus -c demo --trainer.gpus 2", 2, "error: ...here it is --devices..."),
    ("nestmodel fit -c demo --train-manifest x.json", 2, "error: ...the argument CORPUS..."),
    ("nestmodel fit model.encoder.n_layers=16 -c demo", 2, "error: ...--model.config.encoder.num-layers 16..."),
    ("nestdata plan ready.corpus trainer.max_duration=9", 2, "error: ...max-batch-seconds 9..."),
    ("nestmodel fit ready.corpus -c demo -c nemo.yaml", 2, "error: nemo.yaml: model.train_ds ...data.corpus."),
    ("nestmodel export last.ckpt --format nemo", 2, "error: unknown option --format; here it is --to..."),
    ("nestmodel features --checkpoint last.ckpt talks -o f", 2, "error: unknown option --checkpoint; ...MODEL..."),
    ("nestmodel fit ready.corpus -c demo +trainer.fast_dev_run=true", 2, "error: ...'{fast_dev_run: true}'..."),
    ("nestdata plan ready.corpus -c hf.yaml", 2, "error: ...data.plan.batch_size ...data.plan.max_batch_seconds."),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speech, lists of it, its corpus, and things that are wrong."""
    folder = tmp_path_factory.mktemp("newcomer")
    names = [f"talks/{i}.flac" for i in range(NUM_CUTS)]
    for i, name in enumerate(names):
        write_audio(folder / name, chirp(200, 4000, 1.0 + 0.1 * i))
    (folder / "speech.csv").write_text("path,text\n" + "".join(f"{name},what was said\n" for name in names))
    (folder / "list.txt").write_text("".join(f"{name}\n" for name in names))
    prepare_corpus(folder / "talks", folder / "ready.corpus")
    for name in ("empty.json", "ready.json", "runs/a/version_0/config.yaml", "runs/a/version_0/checkpoints/last.ckpt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "nemo.yaml").write_text("model: {train_ds: {manifest_filepath: speech.json}}")
    (folder / "hf.yaml").write_text("data: {plan: {batch_size: 8}}")
    for name in ("pages/index.html", "broken/0.wav"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("This is no audio.")
    for name in ("$(touch x).wav", "; rm -rf x.wav", "two\nlines.wav", "\x1b[2Jcleared.wav"):
        write_audio(folder / "hostile" / name, hiss(16000, 1))
    return folder


@pytest.mark.parametrize(("command", "code", "says"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_line_ends_with_its_code_and_says_what_it_has_to(
    command: str,
    code: int,
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    program, *arguments = shlex.split(command)
    assert PROGRAMS[program](arguments) == code
    shown = capsys.readouterr()
    pattern = ".*".join(re.escape(part) for part in says.split("..."))
    text = (shown.err if code else shown.out).replace(f"{tmp_path}/", "")
    assert any(re.fullmatch(pattern, line) for line in text.splitlines()), f"{shown.out}\n{shown.err}"
    assert "\x1b" not in shown.out + shown.err
    assert code == 0 or set(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_several_ranks_on_a_cpu_are_told_all_options_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert nestmodel.main(["fit", str(folder / "ready.corpus"), "--config", "demo", "--devices", "2"]) == 2
    assert "--accelerator cpu --microbatches-per-step 2" in capsys.readouterr().err


def test_objects_show_themselves_in_a_line_in_a_notebook(folder: Path) -> None:
    corpus = Corpus.open(folder / "ready.corpus")
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(corpus), SpeakerNoiseMixer())
    assert np.isfinite(dataset[0].audio.numpy()).all()
    for shown in (corpus, plan, dataset[0, 0], dataset, NestNetwork(tiny_config())):
        assert len(repr(shown)) < 200
