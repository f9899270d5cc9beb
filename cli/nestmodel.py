"""`nestmodel`: trains NEST models, evaluates them and converts their files."""

from collections.abc import Sequence

from .program import Command, Program

PROGRAM = Program(
    name="nestmodel",
    help="Train, evaluate and convert NEST speech encoders.",
    commands={
        "fit": Command(
            "fit:run", "Train a model, configured by YAML files and --section.key flags.", is_lightning=True
        ),
        "validate": Command("fit:run", "Evaluate a checkpoint on the validation corpus.", is_lightning=True),
        "preflight": Command(
            "fit:run", "Check ranks, disks, audio, memory and network with the flags of fit.", is_lightning=True
        ),
        "features": Command("features:features_command", "Extract encoder features, one file per utterance."),
        "probe": Command(
            "probe:probe_command", "Evaluate what the encoder has learned, beside an untrained encoder and log-mels."
        ),
        "import": Command("import_model:import_command", "Convert a NeMo or safetensors model to a checkpoint."),
        "export": Command("export_model:export_command", "Export a model to NeMo, Hugging Face, safetensors or ONNX."),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; see `Program.run`."""
    return PROGRAM.run(argv)
