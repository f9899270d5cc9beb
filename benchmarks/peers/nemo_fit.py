"""Trains NeMo's NEST model with NeMo's own loader; time_to_loss.py runs it.

Does what NeMo's example `masked_token_pred_pretrain.py` does, with a given `model` section, and starts from given
weights. Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import sys
import warnings
from datetime import timedelta

import torch
from timed_weights import TimedWeights

warnings.filterwarnings("ignore")


def main() -> int:
    """Trains until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", help="JSON file with the `model` section, train_ds and optim included")
    parser.add_argument("weights", help="torch file with the weights to start from")
    parser.add_argument("output", help="directory for the weights")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval-s", type=float, default=30.0)
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="must be given with Lhotse, as in NeMo")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    import lightning.pytorch as pl
    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from nemo.utils import logging as nemo_logging
    from omegaconf import OmegaConf

    nemo_logging.setLevel(logging.ERROR)
    pl.seed_everything(arguments.seed, verbose=False)
    with open(arguments.section) as file:
        section = OmegaConf.create(json.load(file))
    # The settings of NeMo's nest_fast-conformer.yaml, except for the clipping of gradients, which both sides have, and
    # for sync_batchnorm, which needs GPUs.
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        strategy="ddp_find_unused_parameters_true" if arguments.ranks > 1 else "auto",
        max_epochs=1000,
        max_steps=arguments.max_steps,
        max_time=timedelta(seconds=arguments.seconds),
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=not section.train_ds.get("use_lhotse", False),
        callbacks=[TimedWeights(arguments.output, arguments.interval_s)],
    )
    model = EncDecDenoiseMaskedTokenPredModel(cfg=section, trainer=trainer)
    model.load_state_dict(torch.load(arguments.weights))
    trainer.fit(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
