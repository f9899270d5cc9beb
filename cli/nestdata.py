"""`nestdata`: prepares corpora, summarises plans and previews batches."""

from collections.abc import Sequence

from .program import Command, Program

PROGRAM = Program(
    name="nestdata",
    help="Prepare speech corpora and inspect the training batches made from them.",
    commands={
        "prepare": Command("prepare:prepare_command", "Prepare one corpus from one or more inputs."),
        "pack": Command("pack:pack_command", "Write the audio of corpora as Lhotse Shar, to a folder or a URL."),
        "verify": Command(
            "verify:verify_command", "Check that the audio of a corpus or packed set is complete and unchanged."
        ),
        "plan": Command("plan:plan_command", "Show the steps, padding and buckets of an epoch without reading audio."),
        "sample-batch": Command("sample_batch:sample_batch", "Inspect single training batches."),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; see `Program.run`."""
    return PROGRAM.run(argv)
