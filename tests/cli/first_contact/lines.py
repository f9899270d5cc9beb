"""What a newcomer types, right and wrong, with the exit code and the decisive line of each.

`tests/cli/test_first_contact.py` runs these lines; `benchmarks/first_contact.py` compares two checkouts by theirs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A command line and what it has to do."""

    command: str
    """What is typed, as a shell would read it."""

    code: int
    """Exit code."""

    says: str
    """A line of the output, or several; `...` is anything, and paths are relative to the newcomer's folder."""

    err_lines: int = 1
    """Maximum number of lines on standard error that are not blank."""

    out_lines: int | None = None
    """Maximum number of lines on standard output; None for any."""

    hidden: tuple[str, ...] = ()
    """Modules that are not installed."""

    interrupt_at: str = ""
    """A pattern; Ctrl-C is pressed when the output has it."""


_HELP = 30
_SEE = "See `nestmodel fit --help`."
_PRESETS = "The presets are demo, large, medium, small, xlarge. After one of them, streaming or unified may be given."
_DOTTED = "speech.corpus --config tiny.yaml --data.noise noise.corpus"
_SHORT = "speech.corpus --noise noise.corpus -c tiny.yaml"

LINES = (
    # The programs
    Line("nestdata", 2, "usage: nestdata COMMAND [OPTIONS]", _HELP),
    Line("nestmodel", 2, "usage: nestmodel COMMAND [OPTIONS]", _HELP),
    Line("nestdata --help", 0, "  prepare ...", 0, _HELP),
    Line("nestmodel -h", 0, "  fit ...", 0, _HELP),
    Line("nestmodel --version", 0, "nestmodel 0.1.0", 0, 1),
    Line("nestdata prepar talks", 2, "error: No such command 'prepar'. Did you mean 'prepare'? See `nestdata --help`."),
    Line(
        "nestdata preview speech.corpus",
        2,
        "error: No such command 'preview'. Did you mean 'sample-batch preview'? See `nestdata --help`.",
    ),
    Line(
        "nestmodel train --config demo",
        2,
        "error: No such command 'train'. Did you mean 'fit'? See `nestmodel --help`.",
    ),
    Line("nestmodel --print-completion bash", 0, "complete -F _tyro_nestmodel nestmodel", 0),
    Line("nestdata prepare -h", 0, "  nestdata prepare noise.json -o noise.corpus --pcm", 0),
    Line("nestmodel fit --help", 0, "  nestmodel fit speech.corpus --config demo", 0),
    Line("nestmodel fit --help-all", 0, "...--trainer.strategy...", 0),
    Line("nestmodel presets", 0, "large ... 113 M ... 512 x 17 ...", 0, _HELP),
    Line("nestmodel presets large", 0, "trainer:", 0),
    Line(
        "nestmodel presets larg", 2, f"error: 'larg' is neither a file nor a preset; the nearest is 'large'. {_PRESETS}"
    ),
    # nestdata prepare
    Line("nestdata prepare", 2, "error: INPUT is missing: give one or more."),
    Line("nestdata prepare talks", 0, "talks.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare speech.json -o my.corpus --jobs 2", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare talk.wav", 0, "talk.corpus: 1 cuts, 0.00 h, 2.00 to 2.00 s"),
    Line("nestdata prepare speech.csv -o my.corpus", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare list.txt", 0, "list.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare speech.json -o speech.corpus", 1, "error: speech.corpus: exists already...--overwrite..."),
    Line(
        "nestdata prepare nosuch -o my.corpus",
        1,
        "error: nosuch: no such file or folder. Check the path, which starts from ..",
    ),
    Line(
        "nestdata prepare empty.json -o my.corpus",
        1,
        "error: empty.json: the manifest is empty. Check the command that wrote it.",
    ),
    Line(
        "nestdata prepare documents -o my.corpus",
        1,
        "error: documents: no audio in this folder or its subfolders; of other kinds: 1 .html. ...",
    ),
    Line("nestdata prepare speech.corpus -o my.corpus", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s", 0),
    Line("nestdata prepare speech.json -o my.corpus --jobs -1", 2, "error: ...jobs...-1..."),
    Line("nestdata prepare speech.json -o my.corpus --sampling-rat 8000", 2, "error: ...--sampling-rate..."),
    Line("nestdata prepare talk.wav -o my.corpus --format kaldi", 1, "error: talk.wav: ...directory..."),
    Line("nestdata prepare unreadable -o my.corpus", 1, "error: unreadable: cannot be listed (Permission denied). ..."),
    Line(
        "nestdata prepare broken -o my.corpus",
        1,
        "error: broken: no usable cut among 3 entries (3 unreadable); the first: broken/0.wav: ...",
    ),
    Line("nestdata prepare hostile -o my.corpus", 0, "my.corpus: 4 cuts, 0.00 h, 1.00 to 1.00 s"),
    Line("nestdata prepare 'hostile/$(touch x).wav' -o my.corpus", 0, "my.corpus: 1 cuts, 0.00 h, 1.00 to 1.00 s"),
    Line("nestdata prepare escape.json -o my.corpus", 1, "error: escape.json:1: duration is -1..."),
    Line("nestdata prepare talks -o readonly/my.corpus", 1, "error: readonly/my.corpus: cannot be written (...)..."),
    Line(
        "nestdata prepare saved -o my.corpus",
        2,
        "error: saved: ...Install it with `pip install 'nest-pretrain[huggingface]'`.",
        hidden=("pyarrow",),
    ),
    Line(
        *(
            "nestdata prepare talks -o my.corpus --segment vad",
            2,
            "error: finding speech needs silero-vad and onnxruntime. Install them with "
            "`pip install 'nest-pretrain[vad]'`.",
        ),
        hidden=("silero_vad",),
    ),
    # nestdata pack, verify, plan and preview
    Line("nestdata pack speech.corpus -o packed", 0, "packed: 40 cuts, 0.01 h, 1 shards, ... GB"),
    Line("nestdata verify speech.corpus", 0, "speech.corpus: ..."),
    Line("nestdata plan speech.corpus --max-batch-seconds 10", 0, "... steps per epoch, ... cuts, ... h", 0),
    Line("nestdata plan", 2, "error: no corpus: give CORPUS, or a configuration with data.corpus."),
    Line(
        "nestdata plan speech.json",
        1,
        "error: speech.json: is a file, not a corpus. Run `nestdata prepare speech.json -o speech.corpus`, and ...",
    ),
    Line(
        "nestdata plan speech.corpus --max-batch-seconds 1.2",
        1,
        "error: speech.corpus: 25 of 40 cuts, with ... % of the audio, are longer than plan.max_batch_seconds ...",
    ),
    Line(
        *("nestdata sample-batch preview speech.corpus --noise noise.corpus --max-batch-seconds 2", 0),
        *("pictures and sound: preview/index.html", 0),
    ),
    Line(
        "nestdata sample-batch preview speech.corpus --noise noise.corpus -o documents",
        1,
        "error: documents: exists already and is not a preview. Choose another path.",
    ),
    Line(
        "nestdata sample-batch preview speech.corpus --step -1",
        2,
        "error: --step is -1: expected 0 or more.",
    ),
    # nestmodel fit: mistyped and missing options and values
    Line(
        "nestmodel fit",
        2,
        "error: no corpus and configuration: ... such as `nestmodel fit speech.corpus --config small`. ...",
    ),
    Line(
        "nestmodel fit --config demo",
        2,
        "error: no corpus: give one, such as `nestmodel fit speech.corpus --config demo`. ...",
    ),
    Line(
        "nestmodel fit speech.corpus --config nosuch", 2, f"error: 'nosuch' is neither a file nor a preset. {_PRESETS}"
    ),
    Line(
        "nestmodel fit speech.corpus --config large.yml",
        2,
        f"error: 'large.yml' is neither a file nor a preset; the nearest is 'large'. {_PRESETS}",
    ),
    Line(
        "nestmodel fit speech.corpus --conf demo", 2, f"error: unknown option --conf; the nearest is '--config'. {_SEE}"
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --batch-size 16",
        2,
        f"error: unknown option --batch-size; the nearest is '--max-batch-seconds'. {_SEE}",
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --gpus 2", 2, f"error: unknown option --gpus; here it is --devices. {_SEE}"
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --epochs 10",
        2,
        f"error: unknown option --epochs; here it is --max-steps. {_SEE}",
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --learning-rate 0.1",
        2,
        f"error: unknown option --learning-rate. {_SEE}",
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --max-steps ten",
        2,
        "error: Error parsing --max-steps/--trainer.max-steps: ...'ten'. See `nestmodel fit --help`.",
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --max-steps 0",
        2,
        "error: trainer.max_steps is 0: expected the number of steps to train, or -1 for no limit.",
    ),
    Line(
        "nestmodel fit speech.corpus -c demo --num-workers -1", 2, "error: data.num_workers is -1: expected 0 or more."
    ),
    # nestmodel fit: data, outputs and checkpoints
    Line(
        f"nestmodel fit {_DOTTED} --trainer.max-steps 2 --output out",
        0,
        "checkpoints: out/version_0/checkpoints",
        20,
    ),
    Line(f"nestmodel fit {_SHORT} --max-steps 2 -o out", 0, "checkpoints: out/version_0/checkpoints", 20),
    Line(f"nestmodel fit {_SHORT} --max-steps 2 -o out --quiet", 0, "checkpoints: out/version_0/checkpoints", 0),
    Line(f"nestmodel fit {_SHORT} --max-steps 6 -o out --ckpt-path last.ckpt", 0, "start       last.ckpt", 20),
    Line(
        "nestmodel fit speech.json --config demo",
        1,
        "error: speech.json: is a file, not a corpus. Run `nestdata prepare speech.json -o speech.corpus`, and ...",
    ),
    Line(
        *("nestmodel fit noise.corpus --config tiny.yaml --data.noise speech.corpus", 0),
        *(
            "noise.corpus and speech.corpus may be swapped: the noise corpus has transcripts, and ... has none.",
            20,
        ),
    ),
    Line(
        *("nestmodel fit speech.corpus --config tiny.yaml --data.noise speech.corpus", 0),
        *("speech.corpus is given as speech and as noise: the noise is then speech.", 20),
    ),
    Line(
        *(
            "nestmodel fit speech.corpus --config demo --trainer.strategy ddp --trainer.devices 3 "
            "--accelerator cpu --data.plan.microbatches-per-step 8",
            2,
            "error: plan.microbatches_per_step is 8, which 3 ranks cannot share evenly: ...",
        ),
    ),
    Line(f"nestmodel fit {_DOTTED} --output readonly", 1, "error: readonly: cannot be written (...)..."),
    Line(
        *(f"nestmodel fit {_DOTTED} --output out --ckpt-path last", 0),
        *("no checkpoint in out: starting at step 0", 20),
    ),
    Line(f"nestmodel fit {_SHORT} -o out --resume", 2, "error: there is no checkpoint in out. Check --output, ..."),
    Line(
        f"nestmodel fit {_DOTTED} --ckpt-path nosuch.ckpt",
        2,
        "error: --ckpt-path nosuch.ckpt: does not exist. Give a file that exists.",
    ),
    Line(
        f"nestmodel fit {_DOTTED} --ckpt-path damaged.ckpt",
        2,
        "error: --ckpt-path damaged.ckpt: neither a .nemo file, ... nor safetensors, or damaged. ...",
    ),
    Line(
        f"nestmodel fit {_DOTTED} --ckpt-path last.ckpt --model.config.encoder.d-model 32",
        2,
        "error: the checkpoint was written ... other data or settings (model.config.encoder.d_model: 16 -> 32). ...",
    ),
    Line(
        *(f"nestmodel fit {_DOTTED} --trainer.max-steps 100000 --output out", 130),
        *("interrupted after step ...; continue with the same command and --resume.", 40),
        interrupt_at=r"\bstep [1-9]",
    ),
    Line(
        f"nestmodel fit {_SHORT} -o out --log wandb",
        2,
        "error: --log wandb needs a package: pip install 'nest-pretrain[wandb]'.",
        hidden=("wandb",),
    ),
    # The other commands of nestmodel
    Line(
        *(
            "nestmodel validate speech.corpus --config tiny.yaml --data.val-corpus speech.corpus --ckpt-path last.ckpt",
            0,
        ),
        *("step 4: validation loss ...", 20),
    ),
    Line(
        "nestmodel preflight speech.corpus --config tiny.yaml",
        0,
        "preflight on 1 rank, cpu...",
        20,
    ),
    Line("nestmodel features last.ckpt talk.wav -o talk.features", 0, "talk.features: 1 utterances, ..."),
    Line(
        "nestmodel features last.ckpt talks -o my.features --layers 7",
        2,
        "error: layers is '7': give each layer once, from 0 (...) to 2 (the output of the last block).",
    ),
    Line("nestmodel features talks last.ckpt -o my.features", 1, "error: talks: a folder, and not one of ..."),
    Line(
        "nestmodel probe label last.ckpt speech.json --label dialect",
        1,
        "error: label is 'dialect', and no utterance has that label. The labels here: sound (40), text (40).",
    ),
    Line(
        "nestmodel probe label last.ckpt speech.json --label sound -o probe",
        0,
        "sound: 2 classes, 30 training utterances, 10 held out",
    ),
    Line(
        "nestmodel export last.ckpt --to pytorch",
        2,
        "error: invalid choice 'pytorch' for argument '--to'. Expected one of ('nemo', 'huggingface', ...",
    ),
    Line("nestmodel import model.nemo", 0, "model.ckpt", 0, 1),
    Line(
        *(
            "nestmodel import hf://nvidia/ssl_en_nest_large_v1.0",
            2,
            "error: hf:// names need huggingface_hub: pip install 'nest-pretrain[hub]'.",
        ),
        hidden=("huggingface_hub",),
    ),
)

PROGRAMS = (
    Line("python batches.py", 0, "step 0, microbatch 0: ... cuts\nstep 0, microbatch 1: ... cuts", 0),
    Line(
        *("python loop.py", 0, "equal weights: True, in training mode: False\nexported: mine.nemo", 0),
    ),
    Line("python features.py", 0, "from a file: (25, 16)\nfrom samples: (25, 16)", 0),
    Line("python dataset.py", 0, "the first batch: 0 0\nfrom a DataLoader: [0, 1, 2]", 0),
    Line(
        "python notebook.py",
        0,
        "Corpus: short True\n"
        "BatchPlan: short True\n"
        "AudioNoiseBatch: short True\n"
        "AudioNoiseDataset: short True\n"
        "NestNetwork: short True\n"
        "ManifestError: int where audio was expected (17). Give ...\n"
        "CorpusError: int where a corpus was expected (17). Give ...",
        0,
    ),
)
