"""What a newcomer types, right and wrong, with the exit code and the decisive line of each.

`tests/cli/test_first_contact.py` runs these lines, and `benchmarks/first_contact.py` runs them with an older checkout.
"""

from dataclasses import dataclass

MAX_HELP_LINES = 60


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


_OLD = "--config tiny.yaml --data.corpus speech.corpus --data.noise noise.corpus"
_NEW = "speech.corpus --noise noise.corpus -c tiny.yaml"

LINES = (
    # The programs
    Line("nestdata", 2, "error: ...`nestdata --help`."),
    Line("nestmodel", 2, "error: ...`nestmodel --help`."),
    Line("nestdata --help", 0, "...prepare ...", 0, 40),
    Line("nestmodel -h", 0, "...fit ...", 0, 40),
    Line("nestmodel --version", 0, "nestmodel 0.1.0", 0, 1),
    Line("nestdata prepar talks", 2, "error: No such command 'prepar'. Did you mean 'prepare'? See `nestdata --help`."),
    Line("nestdata preview speech.corpus", 2, "error: No such command 'preview'....sample-batch..."),
    Line("nestmodel train --config demo", 2, "error: No such command 'train'....fit..."),
    Line("nestmodel --show-completion bash", 0, "...complete...nestmodel...", 0),
    Line("nestdata prepare -h", 0, "...nestdata prepare speech.json...", 0),
    Line("nestmodel fit --help", 0, "...nestmodel fit ...", 0, MAX_HELP_LINES),
    Line("nestmodel fit --help-all", 0, "...--trainer.accumulate_grad_batches...", 0),
    Line("nestmodel presets", 0, "...large ...", 0, 20),
    Line("nestmodel presets large", 0, "trainer:", 0),
    Line("nestmodel presets larg", 2, "error: ...larg...large..."),
    # nestdata prepare
    Line("nestdata prepare", 2, "error: Missing argument 'INPUT'. See `nestdata prepare --help`."),
    Line("nestdata prepare talks", 0, "talks.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare speech.json -o my.corpus --jobs 2", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s", 5),
    Line("nestdata prepare talk.wav", 0, "talk.corpus: 1 cuts, 0.00 h, 2.00 to 2.00 s"),
    Line("nestdata prepare speech.csv -o my.corpus", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare list.txt", 0, "list.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s"),
    Line("nestdata prepare speech.json -o speech.corpus", 1, "error: speech.corpus: exists already...--overwrite..."),
    Line("nestdata prepare nosuch -o my.corpus", 1, "error: nosuch: no such manifest..."),
    Line("nestdata prepare empty.json -o my.corpus", 1, "error: empty.json: ...empty..."),
    Line("nestdata prepare documents -o my.corpus", 1, "error: documents: ...no audio..."),
    Line("nestdata prepare speech.corpus -o my.corpus", 0, "my.corpus: 40 cuts, 0.01 h, 1.00 to 1.70 s", 0),
    Line("nestdata prepare speech.json -o my.corpus --jobs -1", 2, "error: ...jobs...-1..."),
    Line("nestdata prepare speech.json -o my.corpus --sampling-rat 8000", 2, "error: ...--sampling-rate..."),
    Line("nestdata prepare talk.wav -o my.corpus --format kaldi", 1, "error: talk.wav: ...directory..."),
    Line("nestdata prepare unreadable -o my.corpus", 1, "error: unreadable: ...ermission..."),
    Line("nestdata prepare broken -o my.corpus", 1, "error: ...no usable cut among 3 entries...broken/0.wav..."),
    Line("nestdata prepare hostile -o my.corpus", 0, "my.corpus: 4 cuts, 0.00 h, 1.00 to 1.00 s"),
    Line("nestdata prepare 'hostile/$(touch x).wav' -o my.corpus", 0, "my.corpus: 1 cuts, 0.00 h, 1.00 to 1.00 s"),
    Line("nestdata prepare escape.json -o my.corpus", 1, "error: escape.json:1: duration is -1..."),
    Line("nestdata prepare talks -o readonly/my.corpus", 1, "error: readonly/my.corpus: cannot be written (...)..."),
    Line("nestdata prepare saved -o my.corpus", 1, "error: ...nest-pretrain[huggingface]...", hidden=("datasets",)),
    Line(
        *("nestdata prepare talks -o my.corpus --segment vad", 1, "error: ...nest-pretrain[vad]..."),
        hidden=("silero_vad",),
    ),
    # nestdata pack, verify, plan and preview
    Line("nestdata pack speech.corpus -o packed", 0, "packed: 40 cuts, 0.01 h, 1 shards, ... GB"),
    Line("nestdata verify speech.corpus", 0, "speech.corpus: ..."),
    Line("nestdata plan speech.corpus --max-batch-seconds 10", 0, "... steps per epoch, ... cuts, ... h", 0),
    Line("nestdata plan", 2, "error: no corpus: give CORPUS, or a configuration with data.corpus."),
    Line("nestdata plan speech.json", 1, "error: speech.json: ...`nestdata prepare speech.json`..."),
    Line("nestdata plan speech.corpus --max-batch-seconds 1.2", 2, "error: ...max_batch_seconds is 1.2..."),
    Line(
        *("nestdata sample-batch preview speech.corpus --noise noise.corpus --max-batch-seconds 2", 0),
        *("pictures and sound: preview/index.html", 0),
    ),
    Line("nestdata sample-batch preview speech.corpus --noise noise.corpus -o documents", 1, "error: documents: ..."),
    Line("nestdata sample-batch preview speech.corpus --step -1", 2, "error: ...--step...-1..."),
    # nestmodel fit: mistyped and missing options and values
    Line("nestmodel fit", 2, "error: ...--config small..."),
    Line("nestmodel fit --config demo", 2, "error: ...corpus..."),
    Line("nestmodel fit speech.corpus --config nosuch", 2, "error: ...nosuch...demo, large, medium, small, xlarge..."),
    Line("nestmodel fit speech.corpus --config large.yml", 2, "error: large.yml...large..."),
    Line("nestmodel fit speech.corpus --conf demo", 2, "error: ...--conf...--config..."),
    Line("nestmodel fit speech.corpus -c demo --batch-size 16", 2, "error: ...--batch-size...--max-batch-seconds..."),
    Line("nestmodel fit speech.corpus -c demo --gpus 2", 2, "error: ...--gpus...--devices..."),
    Line("nestmodel fit speech.corpus -c demo --epochs 10", 2, "error: ...--epochs...--max-steps..."),
    Line("nestmodel fit speech.corpus -c demo --learning-rate 0.1", 2, "error: ...--learning-rate...--lr..."),
    Line("nestmodel fit speech.corpus -c demo --max-steps ten", 2, "error: ...max_steps...ten..."),
    Line("nestmodel fit speech.corpus -c demo --max-steps 0", 2, "error: ...max_steps...0..."),
    Line("nestmodel fit speech.corpus -c demo --num-workers -1", 2, "error: ...num_workers...-1..."),
    # nestmodel fit: data, outputs and checkpoints
    Line(f"nestmodel fit {_OLD} --trainer.max-steps 2 --trainer.default_root_dir out", 0, "checkpoints: out/...", 20),
    Line(f"nestmodel fit {_NEW} --max-steps 2 -o out", 0, "checkpoints: out/...", 20),
    Line(f"nestmodel fit {_NEW} --max-steps 2 -o out --quiet", 0, "checkpoints: out/...", 0),
    Line(f"nestmodel fit {_NEW} --max-steps 6 -o out --ckpt-path last.ckpt", 0, "...last.ckpt...step 4...", 20),
    Line("nestmodel fit --config demo --data.corpus speech.json", 1, "error: speech.json: ..."),
    Line(
        *("nestmodel fit --config tiny.yaml --data.corpus noise.corpus --data.noise speech.corpus", 0),
        *("...warning...swapped...", 20),
    ),
    Line(
        *("nestmodel fit --config tiny.yaml --data.corpus speech.corpus --data.noise speech.corpus", 0),
        *("...warning...same corpus...", 20),
    ),
    Line(
        *(
            "nestmodel fit --config demo --data.corpus speech.corpus --trainer.strategy ddp --trainer.devices 3 "
            "--data.plan.microbatches_per_step 8",
            2,
            "error: ...microbatches_per_step...",
        ),
    ),
    Line(f"nestmodel fit {_OLD} --trainer.default_root_dir readonly", 1, "error: readonly: cannot be written (...)..."),
    Line(
        *(f"nestmodel fit {_OLD} --trainer.default_root_dir out --ckpt_path last", 0),
        *("no checkpoint in out: starting at step 0", 20),
    ),
    Line(f"nestmodel fit {_NEW} -o out --resume", 2, "error: ...no checkpoint in out..."),
    Line(f"nestmodel fit {_OLD} --ckpt_path nosuch.ckpt", 2, "error: --ckpt_path nosuch.ckpt: does not exist..."),
    Line(f"nestmodel fit {_OLD} --ckpt_path damaged.ckpt", 2, "error: --ckpt_path damaged.ckpt: damaged..."),
    Line(f"nestmodel fit {_OLD} --ckpt_path last.ckpt --model.config.encoder.d_model 32", 2, "error: ...d_model..."),
    Line(
        *(f"nestmodel fit {_OLD} --trainer.max_steps 100000 --trainer.default_root_dir out", 130),
        *("error: interrupted...out/...", 40),
        interrupt_at=r"\bstep [1-9]",
    ),
    Line(f"nestmodel fit {_NEW} -o out --log wandb", 1, "error: ...nest-pretrain[wandb]...", hidden=("wandb",)),
    # The other commands of nestmodel
    Line(
        *(
            "nestmodel validate --config tiny.yaml --data.corpus speech.corpus --data.val_corpus speech.corpus "
            "--ckpt_path last.ckpt",
            0,
        ),
        *("step 4: validation loss ...", 20),
    ),
    Line("nestmodel preflight --config tiny.yaml --data.corpus speech.corpus --feeding_seconds 1", 0, "...", 20),
    Line("nestmodel features last.ckpt talk.wav -o talk.features", 0, "talk.features: 1 utterances, ..."),
    Line("nestmodel features last.ckpt talks -o my.features --layers 7", 2, "error: layers is '7'..."),
    Line("nestmodel features talks last.ckpt -o my.features", 1, "error: talks: ..."),
    Line("nestmodel probe last.ckpt speech.json --label dialect", 1, "error: label is 'dialect'..."),
    Line("nestmodel probe last.ckpt speech.json --label sound -o probe", 0, "sound: 2 classes, ..."),
    Line("nestmodel export last.ckpt --to pytorch", 2, "error: Invalid value for '--to': 'pytorch' is not one of ..."),
    Line("nestmodel import model.nemo", 0, "model.ckpt", 0, 1),
    Line(
        *("nestmodel import hf://nvidia/ssl_en_nest_large_v1.0", 1, "error: ...nest-pretrain[huggingface]..."),
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
    Line("python notebook.py", 0, "Corpus: short True, HTML True\nBatchPlan: short True, HTML True", 0),
)
