"""Time of a chunk and real-time factor of streaming encoders, compared with NeMo 3.0.0; memory over an hour of audio.

    python -m benchmarks run streaming speech.json --nemo-python PATH [--rounds 5] [--quick] [--results FILE.md]

speech.json contains NeMo lines; the first minute of their audio is used. Both sides have the same random weights, in a
`.nemo` file and a checkpoint, and one thread. They alternate; ratios are computed within a round, and medians are
reported. Ours is given samples and computes features; NeMo is given the features of the whole minute, and the time for
these does not count.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
import torch

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of, own_command
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.rounds import run_rounds, spread
from nestmodel import NestConfig, NestNetwork, StreamingEncoder, export_model, load_network, save_network

QUICK = None
RATE = 16000
CONTEXTS = ((70, 13), (70, 6), (70, 1), (70, 0))
PRESETS = ("small", "large")


class Case(NamedTuple):
    """A model and one of its contexts."""

    preset: str
    context: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.preset}-{self.context[0]}-{self.context[1]}"


def main() -> int:
    """Measures, and writes the table."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "seconds": 10, "hour_s": 60})
    parser.add_argument("speech", type=Path, nargs="?", help="NeMo lines")
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo")
    parser.add_argument("--seconds", type=int, default=60, help="length of the audio [%(default)s]")
    parser.add_argument("--hour-s", type=int, default=3600, help="audio after which memory is measured [%(default)s]")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        model, audio, frames = map(Path, arguments.child[:3])
        stream(model, audio, frames, int(arguments.child[3]))
        return 0
    if arguments.speech is None or arguments.nemo_python is None:
        parser.error("SPEECH and --nemo-python are required")
    cases = [Case(preset, context) for preset in PRESETS for context in CONTEXTS]
    cases = cases[:1] if arguments.quick else cases
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.save(read_audio(arguments.speech, arguments.seconds), directory / "audio.pt")
        for case in cases:
            write_models(directory, case)
        contestants = {case: partial(measure, arguments.nemo_python, directory, case) for case in cases}
        rounds = run_rounds(contestants, arguments.rounds, warm_up=0)
        growth_mb = run_ours(directory, cases[0], arguments.hour_s // arguments.seconds)["growth_mb"]
    report = Report(
        "Streaming encoders",
        __file__,
        f"{len(rounds)} rounds, {machine()}, {versions('torch')}, NeMo 3.0.0.",
        results=arguments.results,
    )
    report.text(f"""{arguments.seconds} s of speech, chunk by chunk, in one stream with one thread; random weights, the
        same on both sides. The real-time factor is the time of computing over the time of the audio. Ours contains the
        features; NeMo's are computed before, for all of the audio. The sides alternate. Medians, with minimum and
        maximum of the ratios.""")
    columns = ["preset", "context", "look-ahead, s", "a chunk, median / 95 %, ms", "real-time factor, ours", "NeMo"]
    report.table(
        [*columns, "NeMo / ours", "differs from the whole", "from NeMo"],
        (row(case, [one[case] for one in rounds], arguments.seconds) for case in cases),
    )
    numbers = sorted({" and ".join(map(str, found["frames"])) for one in rounds for found in one.values()})
    report.text(f"""Numbers of frames, ours and NeMo's: {", ".join(numbers)}. With `{cases[0].name}`, the memory of the
        process grew by {growth_mb:.1f} MB from the first {arguments.seconds} s to the end of {arguments.hour_s} s.""")
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
    network = NestNetwork(replace(config, encoder=config.conformer.with_context(case.context))).eval()
    save_network(network, directory / f"{case.name}.ckpt")
    export_model(network, "nemo", directory / f"{case.name}.nemo")


def measure(nemo_python: str, directory: Path, case: Case) -> dict[str, Any]:
    """Returns the seconds of the chunks on both sides, and by how much the frames differ."""
    ours = run_ours(directory, case)["seconds"]
    paths = [directory / f"{case.name}.nemo", directory / "audio.pt", directory / "nemo.pt"]
    nemo = json_of([nemo_python, PEERS / "nemo_stream.py", *paths])
    our_frames, nemo_frames = torch.load(directory / "ours.pt"), torch.load(directory / "nemo.pt")
    size = min(len(our_frames), len(nemo_frames))
    return {
        "ours": ours,
        "nemo": nemo,
        "from whole": float((our_frames - encode_whole(directory, case)).abs().max()),
        "from nemo": float((our_frames[:size] - nemo_frames[:size]).abs().max()),
        "frames": (len(our_frames), len(nemo_frames)),
    }


def run_ours(directory: Path, case: Case, repeats: int = 1) -> Any:
    """Runs our side in a process of its own, and returns what it measured."""
    paths = [directory / f"{case.name}.ckpt", directory / "audio.pt", directory / "ours.pt"]
    return json_of(own_command(__file__, "--child", *paths, repeats))


def stream(model: Path, audio: Path, frames: Path, repeats: int) -> None:
    """Writes the frames, and prints the seconds of each chunk as JSON, features included, and the growth of memory."""
    torch.set_num_threads(1)
    encoder = StreamingEncoder(load_network(model))
    parts = torch.load(audio).split(round(encoder.chunk_s * RATE))
    found: list[torch.Tensor] = []
    seconds = []
    first_mb = 0.0
    for repeat in range(repeats):
        for part in parts:
            began = time.perf_counter()
            encoded = encoder.feed(part)
            seconds.append(time.perf_counter() - began)
            if repeat == 0:
                found.append(encoded)
        if repeat == 0:
            first_mb = resident_mb()
    found.append(encoder.close())
    torch.save(torch.cat(found), frames)
    print(json.dumps({"seconds": seconds, "growth_mb": resident_mb() - first_mb}))


def resident_mb() -> float:
    """Returns the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@torch.inference_mode()
def encode_whole(directory: Path, case: Case) -> torch.Tensor:
    """Returns the frames of the whole audio at once."""
    network, audio = load_network(directory / f"{case.name}.ckpt"), torch.load(directory / "audio.pt")
    frames, lens = network.encoder(*network.features(audio.unsqueeze(0), torch.tensor([len(audio)])))
    first: torch.Tensor = frames[0, : lens[0]]
    return first


def row(case: Case, found: Sequence[Mapping[str, Any]], seconds: int) -> list[str]:
    """Returns the cells of a case, given what each round measured."""
    ours, nemo = ([sum(one[side]) / seconds for one in found] for side in ("ours", "nemo"))
    middle, late = ([1000 * statistics.quantiles(one["ours"], n=20)[index] for one in found] for index in (9, 18))
    return [
        case.preset,
        f"{case.context[0]},{case.context[1]}",
        f"{NestConfig.preset(case.preset, 'streaming').look_ahead_s(case.context):.2f}",
        f"{statistics.median(middle):.1f} / {statistics.median(late):.1f}",
        f"{statistics.median(ours):.3f}",
        f"{statistics.median(nemo):.3f}",
        spread([b / a for a, b in zip(ours, nemo, strict=True)]),
        *(f"{max(one[what] for one in found):.0e}" for what in ("from whole", "from nemo")),
    ]


if __name__ == "__main__":
    sys.exit(main())
