"""Time of a chunk and real-time factor of streaming encoders, compared with NeMo 3.0.0; memory over an hour of audio.

    python benchmarks/bench_streaming.py speech.json --nemo-python PATH [--rounds 5] [--quick]
        [--results benchmarks/results/NAME]

speech.json are NeMo lines, whose first audio is joined to a minute. Both sides have the same random weights, in a
`.nemo` file and a checkpoint, and one thread. They alternate; ratios are computed within a round, and medians are
reported. Ours is given samples and computes features; NeMo is given the features of the whole minute, whose time does
not count.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
import torch
from measured import measured_line
from peer import run_peer

from nestmodel import NestConfig, NestNetwork, export_model, load_network, save_network

PEERS = Path(__file__).parent / "peers"
RATE = 16000
CONTEXTS = ((70, 13), (70, 6), (70, 1), (70, 0))
PRESETS = ("small", "large")
HOUR_S = 3600
MEASURED = (
    "benchmarks/bench_streaming.py",
    "benchmarks/peers/nemo_stream.py",
    "benchmarks/peers/our_stream.py",
    "nestmodel/nn",
)


class Case(NamedTuple):
    """A model and one of its contexts."""

    preset: str
    context: tuple[int, int]


def main() -> int:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="NeMo lines")
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="ten seconds, one round and one case, to check the script")
    parser.add_argument("--results", type=Path, default=Path("streaming.md"))
    arguments = parser.parse_args()
    cases = [Case(preset, context) for preset in PRESETS for context in CONTEXTS]
    seconds, num_rounds, hour_s = (10, 1, 60) if arguments.quick else (60, arguments.rounds, HOUR_S)
    cases = cases[:1] if arguments.quick else cases
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        audio = read_audio(arguments.speech, seconds)
        torch.save(audio, directory / "audio.pt")
        for case in cases:
            write_models(directory, case)
        rounds = [[measure(arguments, directory, case) for case in cases] for _ in range(num_rounds)]
        hour = json.loads(run_ours(directory, cases[0], "--repeats", hour_s // seconds))
    arguments.results.write_text(report(cases, rounds, hour["growth_mb"], seconds, hour_s), encoding="utf-8")
    print(arguments.results.read_text(encoding="utf-8"))
    return 0


def read_audio(manifest: Path, seconds: int) -> torch.Tensor:
    """Returns the first audio of a manifest, joined, shape (samples,)."""
    parts: list[torch.Tensor] = []
    for line in manifest.read_text(encoding="utf-8").splitlines():
        if sum(map(len, parts)) >= seconds * RATE:
            break
        samples, rate = soundfile.read(manifest.parent / json.loads(line)["audio_filepath"], dtype="float32")
        if rate == RATE and samples.ndim == 1:
            parts.append(torch.from_numpy(samples))
    return torch.cat(parts)[: seconds * RATE]


def write_models(directory: Path, case: Case) -> None:
    """Writes a model of random weights as a checkpoint and as a .nemo file."""
    config = NestConfig.preset(case.preset, "streaming")
    network = NestNetwork(replace(config, encoder=config.encoder.with_context(case.context))).eval()
    save_network(network, directory / f"{name_of(case)}.ckpt")
    export_model(network, "nemo", directory / f"{name_of(case)}.nemo")


def name_of(case: Case) -> str:
    """Returns the name of the files of a case."""
    return f"{case.preset}-{case.context[0]}-{case.context[1]}"


def measure(arguments: argparse.Namespace, directory: Path, case: Case) -> dict[str, Any]:
    """Returns the seconds of the chunks on both sides, and by how much the frames differ."""
    ours = json.loads(run_ours(directory, case))["seconds"]
    paths = [directory / f"{name_of(case)}.nemo", directory / "audio.pt", directory / "nemo.pt"]
    output = run_peer([arguments.nemo_python, PEERS / "nemo_stream.py", *paths])
    found, nemo = torch.load(directory / "ours.pt"), torch.load(directory / "nemo.pt")
    whole = encode_whole(directory, case)
    size = min(len(found), len(nemo))
    return {
        "ours": ours,
        "nemo": json.loads(output.splitlines()[-1]),
        "from whole": float((found - whole).abs().max()),
        "from nemo": float((found[:size] - nemo[:size]).abs().max()),
        "frames": (len(found), len(nemo)),
    }


def run_ours(directory: Path, case: Case, *options: object) -> str:
    """Runs our side, and returns its last line."""
    paths = [directory / f"{name_of(case)}.ckpt", directory / "audio.pt", directory / "ours.pt"]
    return run_peer([sys.executable, PEERS / "our_stream.py", *paths, *map(str, options)]).splitlines()[-1]


@torch.inference_mode()
def encode_whole(directory: Path, case: Case) -> torch.Tensor:
    """Returns the frames of the whole audio at once."""
    network, audio = load_network(directory / f"{name_of(case)}.ckpt"), torch.load(directory / "audio.pt")
    frames, lens = network.encoder(*network.features(audio.unsqueeze(0), torch.tensor([len(audio)])))
    return frames[0, : lens[0]]


def report(cases: list[Case], rounds: list[list[dict[str, Any]]], growth_mb: float, seconds: int, hour_s: int) -> str:
    """Returns the result as Markdown."""
    rows = []
    for number, case in enumerate(cases):
        found = [each[number] for each in rounds]
        ours, nemo = ([sum(run[side]) / seconds for run in found] for side in ("ours", "nemo"))
        ratios = [b / a for a, b in zip(ours, nemo, strict=True)]
        times = [1000 * statistics.quantiles(run["ours"], n=20)[index] for run in found for index in (9, 18)]
        config = NestConfig.preset(case.preset, "streaming")
        rows.append(
            f"| {case.preset} | {case.context[0]},{case.context[1]} | {config.look_ahead_s(case.context):.2f} "
            f"| {statistics.median(times[::2]):.1f} / {statistics.median(times[1::2]):.1f} "
            f"| {statistics.median(ours):.3f} | {statistics.median(nemo):.3f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {max(run['from whole'] for run in found):.0e} | {max(run['from nemo'] for run in found):.0e} |"
        )
    numbers = ", ".join(
        sorted({f"{ours} and {nemo}" for each in rounds for ours, nemo in (one["frames"] for one in each)})
    )
    return f"""# Streaming encoders

Made by `benchmarks/bench_streaming.py` on {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, \
NeMo 3.0.0.
{measured_line(*MEASURED)}

{seconds} s of speech, chunk by chunk, in one stream with one thread; random weights, the same on both sides. The
real-time factor is the time of computing over the time of the audio. Ours contains the features; NeMo's are computed
before, for all of the audio. Rounds, in which the sides alternate: {len(rounds)}. Medians, with minimum and maximum of
the ratios.

| preset | context | look-ahead, s | a chunk, median / 95 %, ms | real-time factor, ours | NeMo | NeMo / ours | \
differs from the whole | from NeMo |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Numbers of frames, ours and NeMo's: {numbers}. With `{name_of(cases[0])}`, the memory of the process grew by
{growth_mb:.1f} MB from the first {seconds} s to the end of {hour_s} s.
"""


if __name__ == "__main__":
    sys.exit(main())
