"""Writes the golden arrays of tests/golden again, with the installed NeMo, from the audio, mask and weights in them.

    NEMO_PYTHON benchmarks/peers/nemo_golden.py tests/golden/nemo_tiny.npz [-o NEW.npz]

Prints how far each array moves. Needs nemo_toolkit[asr], but not this package. The weights were initialised by NeMo
2.7.3. NeMo 3.0.0 gives the same arrays, bit for bit, except tokens of padding: there, features are zero and all
codes equally near, and no test compares them.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo_model import build

warnings.filterwarnings("ignore")
GIVEN = ("clean", "noise", "lengths", "mask")


def main() -> int:
    """Computes the arrays, and writes or compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arrays", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="write the new arrays to this file")
    arguments = parser.parse_args()
    with np.load(arguments.arrays) as file:
        stored = dict(file)
    found = {name: value for name, value in stored.items() if name in GIVEN or name.startswith("state/")}
    found |= _computed(stored)
    if {*found} != {*stored}:
        raise SystemExit(f"{arguments.arrays}: other arrays than NeMo gives: {sorted({*found} ^ {*stored})}")
    versions = [json.loads(str(arrays["config"]))["nemo_version"] for arrays in (stored, found)]
    print("NeMo {}, now {}".format(*versions))
    for name in stored:
        if name != "config" and not name.startswith("state/"):
            difference = np.abs(found[name].astype(float) - stored[name].astype(float)).max()
            print(f"{name}: largest difference {difference:.2g}, largest magnitude {np.abs(stored[name]).max():.4g}")
    if arguments.output:
        np.savez_compressed(arguments.output, **{name: found[name] for name in stored})
    return 0


@torch.no_grad()
def _computed(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the outputs of one pass in evaluation mode, and NeMo's configuration with its version."""
    import nemo

    config = json.loads(str(stored["config"]))
    model = build(config).eval()
    prefix = "state/"
    state = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=True)
    clean, noise = (torch.from_numpy(stored[name].astype(np.float32) / 32768) for name in ("clean", "noise"))
    mask, lengths = torch.from_numpy(stored["mask"]), torch.from_numpy(stored["lengths"])
    found = {}
    for name, audio in (("features_clean", clean), ("features_noisy", clean + noise)):
        found[name], found["features_len"] = model.preprocessor(input_signal=audio, length=lengths.clone())
    _, found["tokens"] = model.quantizer(input_signal=found["features_clean"])
    embedding = model.mask_processor.mask_embedding.view(1, -1, 1)
    masks = mask.unsqueeze(1).expand_as(found["features_noisy"])
    found["masked_features"] = torch.where(masks > 0, embedding, found["features_noisy"])
    found["encoded"], found["encoded_len"] = model.encoder(
        audio_signal=found["masked_features"], length=found["features_len"]
    )
    found["log_probs"] = model.decoder(encoder_output=found["encoded"])
    found["loss"] = model.loss(
        masks=masks,
        decoder_outputs=found["log_probs"],
        targets=found["tokens"],
        decoder_lengths=found["encoded_len"],
    )
    arrays: dict[str, Any] = {name: np.asarray(value.detach()) for name, value in found.items()}
    return arrays | {"config": np.array(json.dumps(config | {"nemo_version": nemo.__version__}))}


if __name__ == "__main__":
    sys.exit(main())
