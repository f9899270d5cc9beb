"""The loss of networks on held-out speech: the same batches and masks for all networks that are compared."""

from collections.abc import Iterable
from functools import reduce
from operator import add

import torch

from nestdata import AudioNoiseBatch, AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer
from nestmodel import LossStats, NestNetwork, loss_stats


def held_out_batches(speech: Corpus, noise: Corpus, limit: int | None = None) -> list[AudioNoiseBatch]:
    """Returns the noisy batches of one pass over a corpus; the first `limit` of them."""
    plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=32.0, microbatches_per_step=1))
    dataset = AudioNoiseDataset(speech, plan, NoiseSampler(noise), SpeakerNoiseMixer())
    return [dataset[step, 0] for step in range(plan.steps_per_epoch)[:limit]]


@torch.no_grad()
def held_out_metrics(network: NestNetwork, batches: Iterable[AudioNoiseBatch]) -> dict[str, float]:
    """Returns the metrics of all batches together, such as `loss` and `token_entropy`, in nats."""
    values = reduce(add, (loss_stats(network(batch, mask_purpose="validation mask")).flatten() for batch in batches))
    stats = LossStats.unflatten(values, network.config.quantizer.num_codebooks)
    metrics = stats.metrics(torch.stack([stats.token_counts, stats.predicted_counts]))
    return {name: float(value) for name, value in metrics.items()}
