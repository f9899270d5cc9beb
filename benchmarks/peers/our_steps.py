"""Training steps of our NEST model on a CPU, as `nemo_steps.py` makes them; `benchmarks/model/step.py` runs it.

    python benchmarks/peers/our_steps.py REQUESTS

The requests are the same as for `nemo_steps.py`. Prints the milliseconds of the steps and the peak memory, as JSON.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from nemo_model import section

from nestmodel import NestModel, config_from_nemo, loss_stats
from nestmodel.training.schedule import build_optimizer


def main() -> int:
    """Builds the model, makes the steps, and prints the result."""
    build, steps = map(json.loads, Path(sys.argv[1]).read_text().splitlines())
    model = NestModel(config_from_nemo(section(**build["section"]))).train()
    audio, noisy, lens = torch.load(build["audio"])
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    config = model.config
    optimizer = build_optimizer(trained, config.optimizer, config.conformer.d_model, torch.device("cpu"))["optimizer"]
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(steps["warm_up"] + steps["number"]):
        started = time.perf_counter()
        # Equal to `training_step`, but needs no trainer.
        feats, feat_lens = model.features(torch.cat([audio, noisy]), lens.repeat(2))
        clean, noisy_feats = feats.chunk(2)
        is_masked = model.mask_processor.draw(feat_lens[: len(audio)], feats.shape[-1], generator)
        loss = loss_stats(model.forward_features(clean, noisy_feats, feat_lens[: len(audio)], is_masked)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1000 * (time.perf_counter() - started))
    peak_gb = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    print(json.dumps({"step_ms": times[steps["warm_up"] :], "peak_gb": peak_gb}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
