"""Measures how much noisy audio NeMo's loaders deliver in a second of one core; benchmarks/batches/feeding.py runs it.

Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import torch

warnings.filterwarnings("ignore")


def main() -> int:
    """Prints the audio-seconds in a second of CPU time for each loader, as a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", help="JSON list: the section `train_ds` of each loader")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time of each measurement")
    arguments = parser.parse_args()

    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(json.dumps([_rate(section, arguments.seconds) for section in json.loads(arguments.sections)]))
    return 0


def _rate(section: dict[str, Any], seconds: float) -> float:
    """Measures after the first batch, before which Lhotse fills its buckets."""
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from omegaconf import OmegaConf

    # NeMo's own choice of data set and loader needs no more of a model than this.
    model = SimpleNamespace(cfg=OmegaConf.create({"sample_rate": 16000}), global_rank=0, world_size=1)
    loader = EncDecDenoiseMaskedTokenPredModel._setup_dataloader_from_config(model, OmegaConf.create(section))
    batches = chain.from_iterable(repeat(loader))
    next(batches)
    started, audio_s = time.process_time(), 0.0
    while time.process_time() - started < seconds:
        audio_s += float(next(batches).audio_len.sum()) / 16000
    return audio_s / (time.process_time() - started)


if __name__ == "__main__":
    sys.exit(main())
