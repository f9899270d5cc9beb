"""Opens `.nemo` files in NeMo, or builds models from configurations; writes their outputs and saves them again.

benchmarks/model/nemo_files.py runs it. Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import sys
import warnings
from typing import Any

import torch
from nemo_model import build, perturb

warnings.filterwarnings("ignore")


def main() -> int:
    """Opens `file` or builds `section` for each case, and writes `outputs` and `saved`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", help="JSON: a list of {file or section, inputs, outputs, saved}")
    with open(parser.parse_args().cases) as file:
        cases = json.load(file)
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
    for case in cases:
        if "file" in case:
            model = EncDecDenoiseMaskedTokenPredModel.restore_from(case["file"], map_location="cpu")
        else:
            model = build(case["section"])
            perturb(model)
        torch.save(_outputs(model.eval(), torch.load(case["inputs"])), case["outputs"])
        model.save_to(case["saved"])
    return 0


@torch.no_grad()
def _outputs(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    feats, feat_lens = model.preprocessor(input_signal=inputs["audio"].clone(), length=inputs["audio_lens"].clone())
    encoded, enc_lens = model.encoder(audio_signal=feats, length=feat_lens)
    quantized = feats if model.pre_encoder is None else model.pre_encoder.get_current_feat().transpose(1, 2)
    _, tokens = model.quantizer(input_signal=quantized)
    found = {
        "feats": feats,
        "feat_lens": feat_lens,
        "tokens": tokens,
        "encoded": encoded.transpose(1, 2),
        "enc_lens": enc_lens,
        "log_probs": model.decoder(encoder_output=encoded),
    }
    return {name: value.clone() for name, value in found.items()}


if __name__ == "__main__":
    sys.exit(main())
