"""`nestmodel`: trains NEST models, evaluates them and converts their files."""

from .program import Command, Program

PROGRAM = Program(
    name="nestmodel",
    help="Train, evaluate and convert NEST speech encoders.",
    commands={
        "fit": Command(
            "fit:fit_command",
            "Train a model on corpora, with the settings of a preset or a YAML file.",
            (
                "nestmodel fit speech.corpus --config demo",
                "nestmodel fit speech.corpus --noise noise.corpus -c small --max-steps 1000",
                "nestmodel fit speech.corpus --config large --devices 8 -o runs/large --resume",
            ),
            reads="run",
            starts_ranks=True,
        ),
        "validate": Command(
            "fit:validate_command",
            "Evaluate a checkpoint on the validation corpus.",
            (
                "nestmodel validate speech.corpus --val-corpus val.corpus --config small \\\n"
                "    --ckpt-path last -o runs/small",
                "nestmodel validate --config runs/small/version_0/config.yaml --ckpt-path last",
            ),
            reads="run",
            starts_ranks=True,
        ),
        "preflight": Command(
            "fit:preflight_command",
            "Check ranks, disks, audio, memory and network with the options of fit.",
            (
                "nestmodel preflight speech.corpus --config large --devices 8",
                "nestmodel preflight speech.corpus --config large --find-budget",
            ),
            reads="run",
            starts_ranks=True,
        ),
        "presets": Command(
            "presets:presets_command",
            "Compare the presets, or print one as YAML.",
            ("nestmodel presets", "nestmodel presets large > run.yaml"),
        ),
        "features": Command(
            "features:features_command",
            "Extract encoder features, one file per utterance.",
            (
                "nestmodel features last.ckpt talks/ -o talks.features",
                "nestmodel features last.ckpt speech.corpus -o speech.features --layers all",
                "nestmodel features last.ckpt speech.corpus -o speech.features --devices 8",
            ),
        ),
        "probe label": Command(
            "probe:probe_label_command",
            "Predict a label from the encoder, beside an untrained encoder and log-mels.",
            ("nestmodel probe label last.ckpt speech.corpus --label language",),
        ),
        "probe characters": Command(
            "probe:probe_characters_command",
            "Recognise characters from the encoder, beside an untrained encoder and log-mels.",
            ("nestmodel probe characters last.ckpt train.json --test test.json -o probe",),
        ),
        "average": Command(
            "convert:average_command",
            "Average the weights of several checkpoints.",
            ("nestmodel average runs/small/version_0/checkpoints/step_*.ckpt -o mean.ckpt",),
        ),
        "import": Command(
            "convert:import_command",
            "Convert a NeMo or safetensors model to a checkpoint.",
            ("nestmodel import ssl_en_nest_large.nemo",),
        ),
        "export": Command(
            "convert:export_command",
            "Export a model to NeMo, Hugging Face, safetensors or ONNX.",
            ("nestmodel export last.ckpt --to nemo", "nestmodel export last.ckpt --to huggingface -o encoder"),
        ),
    },
    other_names={
        "convert": "export",
        "evaluate": "validate",
        "extract": "features",
        "plan": "nestdata plan",
        "prepare": "nestdata prepare",
        "pretrain": "fit",
        "test": "validate",
        "train": "fit",
    },
)

main = PROGRAM.run
