"""Mixes noise into given utterances with NeMo's loader and augmentation; time_to_loss.py and levels.py run it.

Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import random
import sys
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore")


def main() -> int:
    """Writes the noisy audio of all batches, and the lengths that NeMo gives to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "clean", help="torch file: a list of (audio, audio_len) with the shapes (batch, samples), (batch,)"
    )
    parser.add_argument("noise", help="NeMo manifest of noise")
    parser.add_argument("augmentation", help="JSON object: `batch_augmentor` of the data set")
    parser.add_argument("output", help="torch file: a list of (noisy_audio, noisy_audio_len)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    from nemo.collections.asr.data import ssl_dataset
    from nemo.core.classes import Serialization
    from nemo.utils import logging as nemo_logging
    from omegaconf import OmegaConf

    nemo_logging.setLevel(logging.ERROR)
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)  # NeMo draws from it
    noises = ssl_dataset.load_noise_manifest(arguments.noise)
    augmentor = Serialization.from_config_dict(OmegaConf.create(json.loads(arguments.augmentation)))
    mixed = []
    for audio, lengths in torch.load(arguments.clean):
        noise = torch.zeros_like(audio)
        noise_lens = torch.zeros_like(lengths)
        for row, length in enumerate(lengths.tolist()):
            noise[row, :length], noise_lens[row] = ssl_dataset.sample_noise(noises, 16000, length)
        batch = ssl_dataset.AudioNoiseBatch(audio=audio, audio_len=lengths, noise=noise, noise_len=noise_lens)
        mixed_batch = augmentor(batch)
        mixed.append((mixed_batch.noisy_audio, mixed_batch.noisy_audio_len))
    torch.save(mixed, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
