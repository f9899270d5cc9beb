"""Measures utterances per second of NeMo's AudioNoiseDataset with NEST's augmentation; bench_loading.py runs it."""

import argparse
import json
import logging
import sys
import time
import warnings
from typing import Any

warnings.filterwarnings("ignore")


def main() -> int:
    """Loads batches for `--seconds` seconds; prints speed and padding as JSON, one line for each manifest of speech."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("speech")
    parser.add_argument("noise")
    parser.add_argument("--more-speech", nargs="*", default=[], help="further manifests, each measured as the first")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--min-seconds", type=float, default=1.0)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    arguments = parser.parse_args()

    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
    mixing = {
        "_target_": "nemo.collections.asr.modules.ssl_modules.MultiSpeakerNoiseAugmentation",
        "prob": 0.5,
        "noise_ratio": 0.5,
        "min_r_speech": -5.0,
        "max_r_speech": 5.0,
        "min_r_noise": -5.0,
        "max_r_noise": 20.0,
        "min_mix_rate": 0.5,
        "max_mix_rate": 0.5,
        "min_num_segments": 1,
        "max_num_segments": 1,
        "min_num_speakers": 1,
        "max_num_speakers": 1,
    }
    for speech in [arguments.speech, *arguments.more_speech]:
        print(json.dumps(_measure(speech, mixing, arguments)), flush=True)
    return 0


def _measure(speech: str, mixing: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    from nemo.collections.asr.data.ssl_dataset import get_audio_noise_dataset_from_config
    from omegaconf import OmegaConf
    from torch.utils.data import DataLoader

    config = OmegaConf.create(
        {
            "manifest_filepath": speech,
            "noise_manifest": arguments.noise,
            "sample_rate": 16000,
            "batch_size": arguments.batch_size,
            "shuffle": True,
            "min_duration": arguments.min_seconds,
            "max_duration": arguments.max_seconds,
            "labels": None,
            "batch_augmentor": mixing,
        }
    )
    dataset = get_audio_noise_dataset_from_config(config, 0, 1)
    loader = DataLoader(
        dataset,
        batch_size=arguments.batch_size,
        shuffle=True,
        collate_fn=dataset.collate_fn,
        num_workers=arguments.workers,
        drop_last=True,
    )
    num_utterances, real, padded = 0, 0, 0
    started, started_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < arguments.seconds:
        for batch in loader:
            num_utterances += batch.audio.shape[0]
            real += int(batch.audio_len.sum())
            padded += batch.audio.numel()
            if time.perf_counter() - started > arguments.seconds:
                break
    took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
    return {
        "utterances_per_s": num_utterances / took,
        "padding": 1 - real / padded,
        "audio_s_per_core_s": real / 16000 / took_cpu,
    }


if __name__ == "__main__":
    sys.exit(main())
