"""What people type, right and wrong: each line has its exit code and the line that decides."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nestcli import nestdata, nestmodel
from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer, prepare_corpus
from nestmodel import NestNetwork, save_network
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
    ("nestdata plan ready.corpus --weights 1 2", 2, "error: ...plan.weights has 2 numbers for 1 corpora..."),
    ("nestdata plan ready.corpus max_steps=4", 2, "...max_steps=4 is neither a path nor a setting of this command..."),
    ("nestdata plan ready.corpus --world-size 3", 2, "error: ...3 ranks cannot share evenly..."),
    ("nestdata plan ready.corpus --picture plan.xyz", 2, "error: --picture is 'plan.xyz': ....png, .svg or .pdf."),
    (
        "nestdata plan ready.corpus --picture /gone/plan.png",
        1,
        "error: /gone/plan.png: No such file...Check the path...",
    ),
    (
        "nestdata sample-batch preview ready.corpus --rank 2 --world-size 2",
        2,
        "error: ...rank 2 does not exist among 2 ranks...",
    ),
    ("nestmodel fit", 2, "error: no corpus and configuration: give --config with a preset (demo, ..."),
    ("nestmodel fit ready.corpus", 2, "error: no configuration: give --config with a preset (demo, ..."),
    ("nestmodel fit -c demo", 2, "error: no corpus: give one, such as `nestmodel fit speech.corpus --config demo`..."),
    ("nestmodel fit ready.corpus --config dem", 2, "error: ...the nearest is 'demo'..."),
    ("nestmodel fit ready.corpus -c unified", 2, "error: unified is not a whole model..."),
    ("nestmodel fit ready.corpus -c v2", 2, "error: v2 is not a whole model..."),
    ("nestmodel fit gone.corpus -c demo", 2, "error: gone.corpus: does not exist..."),
    ("nestmodel fit ready.corpus --conf demo", 2, "error: unknown option --conf; here it is --config..."),
    ("nestmodel fit --corpus ready.corpus -c demo", 2, "error: unknown option --corpus; ...the argument CORPUS..."),
    ("nestmodel fit corpus=x -c demo", 2, "error: corpus=x is not an argument: give x as the argument CORPUS..."),
    ("nestmodel fit ready.corpus -c demo --max-steps ten", 2, "...'ten'..."),
    ("nestmodel fit ready.corpus -c demo --max-steps 0", 2, "error: trainer.max_steps is 0..."),
    ("nestmodel fit ready.corpus -c demo --weights 0.7,0.3", 2, "...Error parsing --weights..."),
    (
        "nestmodel fit -c demo --weights 1 ready.corpus",
        2,
        "...ready.corpus is taken as a value of --weights: give it before the options...",
    ),
    ("nestmodel fit -c demo ready.corpus --lrr 3", 2, "error: the command line is invalid..."),
    (
        "nestmodel fit ready.corpus -c demo max_stepss=4",
        2,
        "...max_stepss=4 is neither a path nor a setting of this command...",
    ),
    ("nestmodel fit ready.corpus -c demo --lrr 3", 2, "...--lr, --model.config.optimizer.lr FLOAT..."),
    ("nestmodel fit ready.corpus -c demo --trainer.callbacks 3", 2, "...--trainer.callbacks..."),
    ("nestmodel fit ready.corpus -c demo --trainer.lightning '{a: 1'", 2, "...--trainer.lightning..."),
    ("nestmodel fit trainer.max_steps=10 -c demo", 2, "...--trainer.max-steps..."),
    (
        "nestmodel fit ready.corpus -c demo --max-time 30",
        2,
        "error: trainer.max_time is '30': give it with its unit...",
    ),
    ("nestmodel fit ready.corpus -c demo --resume --ckpt-path a", 2, "error: ...--resume and --ckpt-path..."),
    ("nestmodel fit ready.corpus -c demo --trainer.lightning '{max_epoch: 3}'", 2, "...the nearest is 'max_epochs'..."),
    ("nestmodel fit ready.corpus -c demo --accelerator gpu", 2, "error: --accelerator gpu: torch ..."),
    ("nestmodel fit ready.corpus -c demo --devices 2", 2, "error: ...--accelerator cpu --microbatches-per-step 2..."),
    ("nestmodel preflight ready.corpus -c demo --num-batches 0", 2, "error: num_batches is 0..."),
    ("nestmodel preflight ready.corpus -c demo --ckpt-path a.ckpt", 2, "error: --ckpt-path a.ckpt: does not exist..."),
    (
        "nestmodel preflight ready.corpus -c demo --memory-limit 8GiB",
        2,
        "error: --memory-limit has no effect without --find-budget...",
    ),
    (
        "nestmodel preflight ready.corpus -c demo --find-budget --accelerator cpu",
        2,
        "error: ...give the memory that one rank may use...",
    ),
    ("nestmodel features last.ckpt talks", 2, "...--output..."),
    ("nestmodel features last.ckpt talks -o f --layers 9", 2, "error: layers is '9'..."),
    (
        "nestmodel features last.ckpt talks -o talks --overwrite",
        1,
        "error: talks: ...is not a directory of features...",
    ),
    ("nestmodel features gone.ckpt talks -o f", 1, "error: gone.ckpt: does not exist..."),
    ("nestmodel probe characters last.ckpt speech.csv", 2, "...--test..."),
    ("nestmodel probe label a b --label x --test c", 2, "...Unrecognized options: --test..."),
    ("nestmodel import gone.nemo", 1, "error: gone.nemo: does not exist..."),
    ("nestmodel import last.ckpt", 1, "error: last.ckpt: is the input, and would be replaced..."),
    ("nestmodel export last.ckpt --to keras", 2, "...keras..."),
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
    save_network(NestNetwork(tiny_config()), folder / "last.ckpt")
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
    if torch.cuda.is_available() and ("--accelerator" in says or "gpu" in command):
        pytest.skip("for machines without a GPU")
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
    if code:
        (error,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert shown.err.endswith(f"{error}\n")
        assert set(tmp_path.rglob("*")) == before


def test_objects_show_themselves_in_a_line_in_a_notebook(folder: Path) -> None:
    corpus = Corpus.open(folder / "ready.corpus")
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(corpus), SpeakerNoiseMixer())
    assert np.isfinite(dataset[0].audio.numpy()).all()
    for shown in (corpus, plan, dataset[0, 0], dataset, NestNetwork(tiny_config())):
        assert len(repr(shown)) < 200
