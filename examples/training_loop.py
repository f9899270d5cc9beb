"""Pretrains the demo model without Lightning: a corpus, a plan, a network and a loop. Saves it, and loads it again."""

import sys
import tempfile
from pathlib import Path

import torch

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)
from nestmodel import NestConfig, NestNetwork, load_network, loss_stats, save_network

DEMO = Path(__file__).parents[1] / "manifests" / "demo"


def main(num_steps: int = 20) -> list[float]:
    """Trains for some steps and returns the loss of each step, in nats per token."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("speech", "noise"):
            prepare_corpus([DEMO / f"{name}.json"], Path(directory, name))
        speech, noise = Corpus.open(Path(directory, "speech")), Corpus.open(Path(directory, "noise"))
        plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=40.0, microbatches_per_step=1))
        dataset = AudioNoiseDataset(speech, plan, NoiseSampler(noise), SpeakerNoiseMixer())
        network = NestNetwork(NestConfig.preset("demo")).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.98))
        losses = []
        for batch in dataset.loader(microbatches(plan, num_steps=num_steps)):
            loss = loss_stats(network(batch)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            sys.stdout.write(f"step {batch.key.step}: {losses[-1]:.3f} nats\n")
        # Every command takes this checkpoint as well: `nestmodel export demo.ckpt --to huggingface`.
        path = save_network(network, Path(directory, "demo.ckpt"))
        size = sum(parameter.numel() for parameter in load_network(path).parameters())
        sys.stdout.write(f"saved and loaded {size:,} parameters\n")
    return losses


if __name__ == "__main__":
    main()
