"""Difference between encoder states in windows and in one pass over the whole recording, by length of the window.

    python -m benchmarks run windows CHECKPOINT MANIFEST [--seconds 320] [--windows 64 128 256] [--results FILE]

The utterances of MANIFEST (NeMo lines) are joined to one recording of --seconds, which has to fit into memory as a
whole. The states are from the last layer. Prints Markdown.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, versions
from benchmarks.learning.parts.manifests import read_manifest
from nestdata import load_audio
from nestmodel import encode, load_network

QUICK = None


def main() -> int:
    """Encodes the recording as a whole and in windows, and prints the differences."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--seconds", type=float, default=320.0)
    parser.add_argument("--windows", type=float, nargs="+", default=[64.0, 128.0, 256.0])
    arguments = parser.parse_args()
    network = load_network(arguments.checkpoint)
    rate = network.config.features.sampling_rate
    paths = (Path(str(line["audio_filepath"])) for line in read_manifest(arguments.manifest))
    audio = joined((load_audio(path, rate) for path in paths), round(arguments.seconds * rate))
    rows, whole = list[list[str]](), torch.empty(0)
    for window in (len(audio) / rate, *arguments.windows):
        began = time.perf_counter()
        values = encode(network, audio, sampling_rate=rate, window_seconds=window).values
        took = time.perf_counter() - began
        whole = whole if rows else values
        differences = (values - whole).norm(dim=1) / whole.norm(dim=1)
        least = torch.nn.functional.cosine_similarity(values, whole, dim=1).min()
        shares = [f"{100 * differences.quantile(q):.1f} %" for q in (0.5, 0.99)]
        rows.append([f"{window:g} s", *shares, f"{least:.3f}", f"{took:.1f} s"])
    conditions = f"{versions('torch', 'numpy')}, {machine()}. A recording of {len(audio) / rate:g} s."
    report = Report("Encoder states in windows", __file__, conditions, results=arguments.results)
    report.text("Norm of the difference over the norm of the state in one pass, for each frame.")
    report.table(["window", "median", "99th percentile", "least cosine", "time"], rows)
    return 0


def joined(utterances: Iterable[NDArray[np.float32]], num_samples: int) -> NDArray[np.float32]:
    """Returns the first samples of utterances that follow each other.

    Raises:
        SystemExit: There is not enough audio.
    """

    def pieces() -> Iterator[NDArray[np.float32]]:
        left = num_samples
        for utterance in utterances:
            yield utterance[:left]
            left -= len(utterance[:left])
            if not left:
                return
        raise SystemExit(f"the manifest has {left} samples too few for --seconds.")

    return np.concatenate(list(pieces()))


if __name__ == "__main__":
    raise SystemExit(main())
