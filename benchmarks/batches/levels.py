"""Energy of interference at an SNR of 0 dB, here and in NeMo.

    python -m benchmarks run levels REAL_SPEECH OUTPUT --nemo-python PATH [--batches 150] [--results FILE]

REAL_SPEECH contains speech.json and noise.json (NeMo lines). NeMo's own code mixes the clean audio of our batches. On
both sides, every cut gets interference, in one segment of the cut. Prints Markdown.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, command_environment, run_peer
from benchmarks.harness.report import Report, machine, versions
from benchmarks.learning.parts.manifests import read_manifest, write_lines
from benchmarks.learning.parts.pretraining import prepare
from nestdata import AudioNoiseBatch, AudioNoiseDataset, BatchPlan, Corpus, MixConfig, PlanConfig, SpeakerNoiseMixer

QUICK = None
CASES = [
    (kind, ratio, share, bounds)
    for kind, ratio in (("noise", 1.0), ("speech", 0.0))
    for share, bounds in (("0.5", (0.5, 0.5)), ("0.3 to 0.6 (`v2`)", (0.3, 0.6)))
]
"""Kind of interference, its `mix.noise_ratio`, and `mix.mix_rate` in words and as bounds."""


def main() -> int:
    """Mixes on both sides, and prints the energies."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    parser.add_argument("--batches", type=int, default=150)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    for name, options in (("speech", "--min-seconds 4 --max-seconds 30"), ("noise", "--pcm")):
        write_lines(output / f"{name}.json", read_manifest(arguments.real_speech / f"{name}.json"))
        prepare(f"{name}.json", output, options)
    rows = []
    for kind, ratio, share, bounds in CASES:
        config = MixConfig(prob=1.0, noise_ratio=ratio, noise_snr_db=(0, 0), speech_snr_db=(0, 0), mix_rate=bounds)
        batches = our_batches(output, config, arguments.batches)
        nemo = energy_ratios(batches, nemo_mixes(output, arguments.nemo_python, batches, config))
        ours = energy_ratios(batches, [batch.noisy_audio for batch in batches])
        expected = np.mean(10 * np.log10(np.linspace(*bounds, 10_001)))
        rows.append([kind, share, len(nemo), summary(nemo), summary(ours), f"{expected:.1f}"])
    conditions = f"NeMo 3.0.0, {versions('torch', 'numpy')}, {machine()}. Both sides are set to an SNR of 0 dB."
    report = Report("Energy of interference", __file__, conditions, results=arguments.results)
    report.text(
        "Energy of the interference over the energy of the clean utterance, in dB: of the mean ratio; median of the "
        "cuts, and in brackets the 5th and the 95th percentile. The last column is the mean of 10 log10 of the share: "
        "the value here if all samples of an utterance had the same power. Utterances last 4 to 30 s."
    )
    report.table(["interference", "share that is mixed", "cuts", "NeMo", "here", "10 log10 of the share"], rows)
    return 0


def our_batches(output: Path, config: MixConfig, number: int) -> list[AudioNoiseBatch]:
    """Returns batches of at least two cuts, evenly spread over an epoch."""
    speech, noise = (Corpus.open(output / f"{name}.corpus") for name in ("speech", "noise"))
    plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=40.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(speech, plan, noise, SpeakerNoiseMixer(config))
    steps = np.linspace(0, plan.steps_per_epoch, min(number, plan.steps_per_epoch), endpoint=False, dtype=int)
    return [batch for step in steps.tolist() if len((batch := dataset[step, 0]).audio_len) > 1]


def nemo_mixes(output: Path, python: str, batches: list[AudioNoiseBatch], config: MixConfig) -> list[torch.Tensor]:
    """Returns NeMo's noisy audio of batches."""
    augmentation = {
        "_target_": "nemo.collections.asr.modules.ssl_modules.MultiSpeakerNoiseAugmentation",
        "prob": config.prob,
        "noise_ratio": config.noise_ratio,
        **dict.fromkeys(("min_r_speech", "max_r_speech", "min_r_noise", "max_r_noise"), 0.0),
        **dict(zip(("min_mix_rate", "max_mix_rate"), config.mix_rate, strict=True)),
        **dict.fromkeys(("min_num_segments", "max_num_segments", "min_num_speakers", "max_num_speakers"), 1),
    }
    torch.save([(batch.audio, batch.audio_len) for batch in batches], output / "clean.pt")
    paths = [str(output / name) for name in ("clean.pt", "noise.json", "nemo.pt")]
    command = [python, str(PEERS / "nemo_noise.py"), *paths[:2], json.dumps(augmentation), paths[2]]
    run_peer(command, env=command_environment())
    return [noisy for noisy, _ in torch.load(paths[2])]


def energy_ratios(batches: Iterable[AudioNoiseBatch], noisy: Iterable[torch.Tensor]) -> NDArray[np.float64]:
    """Returns the ratio of energies, interference over clean utterance, for each cut with interference."""
    ratios = [
        (mixed.double() - batch.audio.double()).square().sum(dim=1) / batch.audio.double().square().sum(dim=1)
        for batch, mixed in zip(batches, noisy, strict=True)
    ]
    found = torch.cat(ratios).numpy()
    return found[found > 0]


def summary(ratios: NDArray[np.float64]) -> str:
    """Returns the mean ratio in dB, and the median, the 5th and the 95th percentile of the cuts in dB."""
    low, median, high = 10 * np.log10(np.quantile(ratios, [0.05, 0.5, 0.95]))
    return f"{10 * np.log10(ratios.mean()):z.2f}; {median:z.2f} ({low:z.1f} to {high:z.1f})"


if __name__ == "__main__":
    sys.exit(main())
