"""`nestdata`: prepares corpora, summarises plans and previews batches."""

from .program import Command, Program

PROGRAM = Program(
    name="nestdata",
    help="Prepare speech corpora and inspect the training batches made from them.",
    commands={
        "prepare": Command(
            "prepare:prepare_command",
            "Prepare one corpus from inputs; reads headers or, with --probe decode, all audio.",
            (
                "nestdata prepare talks/ -o speech.corpus --jobs 8",
                "nestdata prepare noise.json -o noise.corpus --pcm",
                "nestdata prepare s3://bucket/manifest.json -o speech.corpus",
            ),
        ),
        "pack": Command(
            "pack:pack_command",
            "Write the audio of corpora as Lhotse Shar, to a folder or a URL.",
            (
                "nestdata pack speech.corpus -o speech.packed --jobs 8",
                "nestdata pack speech.corpus -o s3://bucket/packed",
            ),
        ),
        "verify": Command(
            "verify:verify_command",
            "Check that the audio of a corpus is there and unchanged.",
            (
                "nestdata verify speech.corpus --decode",
                "nestdata verify speech.corpus --root /new/disk --set-root",
            ),
        ),
        "plan": Command(
            "plan:plan_command",
            "Show the steps, padding and buckets of an epoch without reading audio.",
            (
                "nestdata plan speech.corpus --config large --world-size 8",
                "nestdata plan en.corpus sw.corpus --temperature 3 --picture plan.svg",
            ),
            reads="data",
        ),
        "sample-batch preview": Command(
            "sample_batch:preview_command",
            "Show the first microbatch of a step and rank, as a run trains on it.",
            (
                "nestdata sample-batch preview speech.corpus --noise noise.corpus",
                "nestdata sample-batch preview --config run.yaml --step 1000 -o preview",
            ),
            reads="data",
        ),
    },
    other_names={
        "batch": "sample-batch preview",
        "check": "verify",
        "create": "prepare",
        "fit": "nestmodel fit",
        "preview": "sample-batch preview",
        "train": "nestmodel fit",
    },
)

main = PROGRAM.run
