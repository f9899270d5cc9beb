"""Records the results of a checkout: losses of 50 demo steps and SHA-256 digests of 50 batches.

A change that promises to keep results runs this in the old and in the new checkout, on one machine, and compares:

    python -m benchmarks.run_record --checkout ../old -o old.json
    python -m benchmarks.run_record -o new.json
    python -m benchmarks.run_record --compare old.json new.json

Only commands and files are used, so that a checkout may be older than this script, if its `fit` has the same options.
Losses are read from `metrics.csv`, with all digits of their float32 values; a digest covers every tensor of a batch.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 50
MAX_BATCH_SECONDS = 40

_DIGESTS = f"""
import json, sys
import nestdata as nd
speech, noise = nd.Corpus.open(sys.argv[1]), nd.Corpus.open(sys.argv[2])
plan = nd.BatchPlan.of(speech, nd.PlanConfig(max_batch_seconds={MAX_BATCH_SECONDS}, microbatches_per_step=2))
dataset = nd.AudioNoiseDataset(speech, plan, nd.NoiseSampler(noise), nd.SpeakerNoiseMixer(nd.MixConfig(prob=0.8)))
digests = [nd.batch_digest(dataset[step, 0]) for step in range({STEPS})]
print(json.dumps([
    [digest["sample_id"], {{name: tensor["sha256"] for name, tensor in digest["tensors"].items()}}]
    for digest in digests
]))
"""
_COMMAND = "import sys; sys.path.insert(0, sys.argv.pop(1)); from nestcli.{name} import main; sys.exit(main())"


def record(checkout: Path) -> dict[str, object]:
    """Runs `prepare`, `fit` and 50 batches with the code of a checkout."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        commands = work / "commands"
        commands.mkdir()
        (commands / "nestcli").symlink_to(checkout / "cli")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(checkout), str(commands)]),
            "OMP_NUM_THREADS": "1",
        }

        def run(*arguments: object) -> str:
            done = subprocess.run(
                [sys.executable, "-c", *map(str, arguments)], cwd=work, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{checkout}: {' '.join(map(str, arguments[2:]))} failed:\n{done.stderr[-2000:]}")
            return done.stdout

        demo = checkout / "manifests/demo"
        data, model = (_COMMAND.format(name=program) for program in ("nestdata", "nestmodel"))
        run(data, commands, "prepare", demo / "speech.json", "-o", "speech.corpus")
        run(data, commands, "prepare", demo / "noise.json", "-o", "noise.corpus", "--pcm")
        run(
            *(model, commands, "fit", "speech.corpus", "--config", "demo", "--noise", "noise.corpus"),
            *f"--max-steps {STEPS} --trainer.log-every-n-steps 1 --output run --trainer.accelerator cpu".split(),
        )
        (metrics,) = (work / "run").glob("version_*/metrics.csv")
        with metrics.open(newline="") as file:
            losses = [row["train_loss"] for row in csv.DictReader(file) if row.get("train_loss")]
        digests = json.loads(run(_DIGESTS, "speech.corpus", "noise.corpus"))
    return {"losses": losses, "batches": digests}


def main() -> int:
    """Records a checkout, or compares two records and returns 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar="RECORD")
    arguments = parser.parse_args()
    if arguments.compare:
        old, new = (json.loads(path.read_text()) for path in arguments.compare)
        for name in ("losses", "batches"):
            equal = sum(a == b for a, b in zip(old[name], new[name], strict=True))
            print(f"{name}: {equal} of {len(old[name])} are equal bit for bit")
        return int(old != new)
    text = json.dumps(record(arguments.checkout.resolve()), indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
