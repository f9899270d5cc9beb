"""Measures a training step of our NEST model, or of its quantizer alone; benchmarks/model/step.py runs it."""

import json
import sys

import torch
from measuring import Stopwatch, batch, parse, quantizer_weights, sizes
from nemo_model import section

from nestmodel import NestModel, config_from_nemo, loss_stats


def main() -> int:
    """Measures, and prints the result as JSON."""
    arguments = parse(__doc__)
    model = NestModel(config_from_nemo(section(**sizes(arguments.what)))).train()
    audio, noisy, lens = batch(arguments)
    if arguments.what == "quantizer":
        model.eval()
        model.quantizer.load_state_dict(quantizer_weights(model.quantizer.state_dict()))
        feats, _ = model.features(audio, lens)
        print(json.dumps(Stopwatch(lambda: model.quantizer(feats), arguments.steps).measured()))
        return 0
    optimizer = model.configure_optimizers()["optimizer"]
    generator = torch.Generator().manual_seed(0)

    def run() -> torch.Tensor:
        # Equal to `training_step`, but needs no trainer.
        feats, feat_lens = model.features(torch.cat([audio, noisy]), lens.repeat(2))
        clean, noisy_feats = feats.chunk(2)
        is_masked = model.mask_processor.draw(feat_lens[: len(audio)], feats.shape[-1], generator)
        loss = loss_stats(model.forward_features(clean, noisy_feats, feat_lens[: len(audio)], is_masked)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    print(json.dumps(Stopwatch(run, arguments.steps).measured()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
