"""Measures how far instruction sets move the numbers of the golden model.

    python -m benchmarks run cpu_settings

Runs the model of `tests/golden` once under each lane of `tests/isa.py`, in a process of its own, and prints Markdown.
Features are compared with the same features in float64, computed without limits; everything else with the stored
arrays of NeMo.
"""

import argparse
import json
import platform
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import json_of, own_command
from benchmarks.harness.report import Report, versions
from benchmarks.harness.repository import REPOSITORY
from nestmodel import NestNetwork, config_from_nemo
from nestmodel.nn.loss import loss_stats
from tests.isa import LANES, lanes_of_this_cpu

QUICK = ()
GOLDEN = REPOSITORY / "tests" / "golden" / "nemo_tiny.npz"
HEADINGS = {
    "capability": "torch reports",
    "features": "features, largest error",
    "features_rms": "features, root mean square",
    "stored_features": "stored features, largest error",
    "encoder": "encoder",
    "log_probs": "log-probabilities",
    "loss": "loss",
    "tokens": "tokens that differ",
}


def measure() -> dict[str, Any]:
    """Returns the errors of this process, under whatever limits its environment sets."""
    with np.load(GOLDEN) as arrays:
        golden = dict(arrays)
    model = NestNetwork(config_from_nemo(json.loads(str(golden["config"])))).eval()
    state = {name[6:]: torch.from_numpy(value) for name, value in golden.items() if name.startswith("state/")}
    model.load_state_dict(state)
    clean, noise = (torch.from_numpy(golden[name].astype(np.float32) / 32768) for name in ("clean", "noise"))
    lengths, is_masked = torch.from_numpy(golden["lengths"]), torch.from_numpy(golden["mask"]).bool()
    with torch.no_grad():
        audio, audio_lens = torch.cat([clean, clean + noise]), lengths.repeat(2)
        feats, feat_lens = model.features(audio, audio_lens)
        exact = deepcopy(model.features).double()(audio.double(), audio_lens)[0].numpy()
        encoded, enc_lens = model.encoder(
            torch.from_numpy(golden["masked_features"]), torch.from_numpy(golden["features_len"])
        )
        log_probs = model.decoder(encoded)
        clean_feats, noisy_feats = feats.chunk(2)
        stats = loss_stats(model.forward_features(clean_feats, noisy_feats, feat_lens[: len(lengths)], is_masked))
        tokens = model.quantizer(clean_feats).numpy()
    errors = np.abs(feats.numpy() - exact)
    stored = np.concatenate([golden["features_clean"], golden["features_noisy"]])
    valid = [slice(0, int(length)) for length in enc_lens]
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": float(errors.max()),
        "features_rms": float(np.sqrt(np.square(errors).mean())),
        "stored_features": float(np.abs(stored - exact).max()),
        "encoder": relative(encoded.transpose(1, 2).numpy(), golden["encoded"]),
        "log_probs": relative(log_probs.numpy(), golden["log_probs"]),
        "loss": relative(np.array(stats.loss), golden["loss"]),
        "tokens": int(sum((tokens[i, span] != golden["tokens"][i, span]).sum() for i, span in enumerate(valid))),
    }


def relative(found: Any, expected: Any) -> float:
    """Returns the largest error as a share of the largest magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def main() -> int:
    """Measures every lane of this CPU and prints a table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # measures this process
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure()))
        return 0
    report = Report(
        "The golden model under the instruction sets of one CPU",
        __file__,
        f"once per lane, {processor()}, {versions('torch', 'numpy')}, Python {platform.python_version()}.",
        results=arguments.results,
    )
    report.text("""Features are compared with features in float64; the other columns with the stored arrays of NeMo, as
        a share of the largest magnitude.""")

    def row(lane: str) -> list[str]:
        found = json_of(own_command(__file__, "--one"), **LANES[lane])
        return [
            lane,
            *(f"{found[name]:.1e}" if isinstance(found[name], float) else str(found[name]) for name in HEADINGS),
        ]

    lanes = lanes_of_this_cpu()
    report.table(["lane", *HEADINGS.values()], map(row, lanes))
    report.text("Environment of the lanes:")
    for lane in lanes:
        settings = ", ".join(f"`{name}={value}`" for name, value in LANES[lane].items())
        report.markdown(f"- {lane}: {settings or 'no limits'}")
    return 0


def processor() -> str:
    """Returns the vendor's name of this CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
