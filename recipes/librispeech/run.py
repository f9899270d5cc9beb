"""Runs the recipe for LibriSpeech: prints each command, and starts it.

    python recipes/librispeech/run.py data runs/librispeech --gpus 8

DATA receives the corpus, OUTPUT models and error rates. `--print` prints the commands without running them. Stages are
download, manifests, corpora, pretrain, export, finetune and score; `--stages export finetune score` runs some of them.
Run it from the root of the repository, in the environment that has the commands.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

TRAIN = ("train-clean-100", "train-clean-360", "train-other-500")
DEV = ("dev-clean", "dev-other")
SCORED = ("dev-clean", "dev-other", "test-clean", "test-other")
STAGES = ("download", "manifests", "corpora", "pretrain", "export", "finetune", "score")
FINETUNE = (
    "--vocabulary 256 --steps 20000 --batch-seconds 400 --lr 3e-4 --warmup-steps 2000 --freeze-steps 1000 "
    "--save-steps 1000"
)

RECIPE, FINETUNE_CTC = Path("recipes/librispeech"), Path("examples/finetune_ctc")

Command = list[str | Path]


def main(argv: list[str] | None = None) -> None:
    """Prints the commands, and runs them unless `--print` is given."""
    args = parse_arguments(argv)
    for stage in args.stages:
        for command in commands(stage, args):
            print("$", shlex.join(map(str, command)), flush=True)
            if not args.print:
                run(command)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", type=Path)
    add("output", type=Path)
    add("--gpus", type=int, choices=(1, 8, 64), default=8, help="64: eight nodes under SLURM, started by sbatch")
    add(
        "--noise", type=Path, help="corpus of noise from `nestdata prepare --pcm`; without it, speech is mixed in alone"
    )
    add("--config", nargs="+", help="presets and files of the pretraining, instead of `large` and gpus_N.yaml")
    add("--finetune", default=FINETUNE, help="options of finetune.py (default: %(default)s)")
    add("--stages", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE", help="stages to run (default: all)")
    add("--print", action="store_true", help="print the commands only")
    return parser.parse_args(argv)


def commands(stage: str, args: argparse.Namespace) -> list[Command]:
    """Returns the commands of a stage."""
    data, output = args.data, args.output
    if stage == "download":
        return [["python", RECIPE / "download.py", data]]
    if stage == "manifests":
        return [["python", RECIPE / "manifests.py", data]]
    if stage == "corpora":
        return [
            ["nestdata", "prepare", *cuts(data, TRAIN), "-o", data / "train.corpus", "--jobs", "8"],
            ["nestdata", "prepare", *cuts(data, DEV), "-o", data / "dev.corpus", "--jobs", "8"],
        ]
    if stage == "pretrain":
        configs = args.config or ["large", RECIPE / f"gpus_{args.gpus}.yaml"]
        fit: Command = [data / "train.corpus", "--val-corpus", data / "dev.corpus"]
        fit += ["--noise", args.noise] if args.noise else []
        fit += [word for config in configs for word in ("--config", config)]
        if args.gpus == 64:
            return [["sbatch", "--nodes", "8", "--wait", "examples/slurm/fit.sbatch", output / "pretrain", *fit]]
        return [["nestmodel", "fit", *fit, "-o", output / "pretrain", "--ckpt-path", "last"]]
    if stage == "export":
        encoder = output / "encoder"
        return [["nestmodel", "export", last_checkpoint(output), "--to", "huggingface", "-o", encoder, "--overwrite"]]
    if stage == "finetune":
        manifests = cuts(data, ("train-clean-100", "dev-other"))
        options = shlex.split(args.finetune)
        program = FINETUNE_CTC / "finetune.py"
        return [["python", program, output / "encoder", *manifests, "-o", output / "recogniser", *options]]
    program = FINETUNE_CTC / "score.py"
    return [["python", program, output / "recogniser", *cuts(data, SCORED), "-o", output / "scores"]]


def cuts(data: Path, parts: tuple[str, ...]) -> list[Path]:
    """Returns the manifests of parts of LibriSpeech."""
    return [data / "cuts" / f"{part}.jsonl.gz" for part in parts]


def last_checkpoint(output: Path) -> Path:
    """Returns the newest checkpoint of the pretraining; before there is one, that of the first start."""
    found = (output / "pretrain").glob("version_*/checkpoints/last.ckpt")
    first = output / "pretrain" / "version_0" / "checkpoints" / "last.ckpt"
    return max(found, key=lambda path: int(path.parts[-3].removeprefix("version_")), default=first)


def run(command: Command) -> None:
    """Runs a command; commands of this Python's environment are found first.

    Raises:
        SystemExit: The command failed.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    code = subprocess.run(list(map(str, command)), env=environment, check=False).returncode
    if code != 0:
        raise SystemExit(f"{command[0]} ended with exit code {code}; later stages were not started.")


if __name__ == "__main__":
    main()
    sys.exit(0)
