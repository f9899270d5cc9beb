"""Starts `nestmodel features` by one or several processes, one of which may die."""

import os
import subprocess
import sys
from pathlib import Path

from nestmodel import NestNetwork, save_network
from tests.cli.commands import Outcome
from tests.synthesis import hiss, write_audio, write_jsonl
from tests.training import tiny_config

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
NESTMODEL = [str(SCRIPTS / "nestmodel")]
DYING = [sys.executable, "-m", "tests.cli.dying_rank"]
TIMEOUT_S = 600


def features(output: str) -> list[str]:
    """Returns a command line for 14 batches, the first of which has a reject."""
    return f"features model.ckpt speech.json -o {output} --device cpu --max-batch-seconds 1".split()


def with_features_of_one_rank(directory: Path) -> Path:
    """Writes `model.ckpt`, `speech.json` with 20 files, a broken one and a missing one, and `one`, their features."""
    save_network(NestNetwork(tiny_config()), directory / "model.ckpt")
    for number in range(20):
        write_audio(directory / "speech" / f"{number}.flac", hiss(4000 + 400 * number, number))
    # The header is intact, so that a rank rejects it.
    late = directory / "speech" / "19.flac"
    late.write_bytes(late.read_bytes()[:4000])
    write_jsonl(directory / "speech.json", [{"audio_filepath": f"speech/{number}.flac"} for number in range(21)])
    assert ended(start(NESTMODEL + features("one"), directory)).code == 0
    assert len((directory / "one" / "index.jsonl").read_text().splitlines()) == 19
    assert len((directory / "one" / "rejected.jsonl").read_text().splitlines()) == 2
    return directory


def start(command: list[str], directory: Path, **variables: str) -> "subprocess.Popen[str]":
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "SLURM")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process: "subprocess.Popen[str]") -> Outcome:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return Outcome(process.returncode, out, err)


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}
