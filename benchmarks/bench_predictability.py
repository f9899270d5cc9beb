"""Measures how well neighbours predict a token, to estimate the lowest possible loss for a length of masked blocks.

    python benchmarks/bench_predictability.py TRAIN_CORPUS HELD_OUT_CORPUS

A small network reads the features of the frames of one or two tokens, at given distances from another token, and
predicts that token. The script prints as Markdown the network's best cross-entropy on the held-out corpus, the entropy
of the held-out tokens, and the cross-entropy of the token frequencies of the training corpus.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestdata import AudioNoiseDataset, BatchPlan, Corpus, PlanConfig
from nestmodel import NestConfig, NestModel

Pair = tuple[Tensor, Tensor]
"""Features, shape (tokens, dim), and token classes, shape (tokens,)."""

OFFSETS = ((-1, 1), (-1,), (-2, 2), (-2, 3), (-3, 3))
EPOCHS, BATCH = 4, 256


def main() -> int:
    """Measures all distances and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    arguments = parser.parse_args()
    model = NestModel(NestConfig.preset("demo")).eval()
    train, held_out = (utterances(model, path) for path in (arguments.train, arguments.held_out))
    print("| visible tokens | entropy | frequencies of the training corpus | best network |\n|---|---|---|---|")
    for offsets in OFFSETS:
        entropy, unigram, best = measure(pairs(train, offsets), pairs(held_out, offsets))
        print(f"| {', '.join(f'{o:+d}' for o in offsets)} | {entropy:.3f} | {unigram:.3f} | {best:.3f} |", flush=True)
    return 0


def utterances(model: NestModel, path: Path) -> list[Pair]:
    """Returns the stacked features of a token, shape (tokens, frames * mels), and tokens of every clean utterance."""
    corpus, factor = Corpus.open(path), model.config.encoder.subsampling_factor
    config = PlanConfig(max_batch_seconds=45.0, microbatches_per_step=1)
    plan = BatchPlan(corpus.num_samples, corpus.sampling_rate, config)
    dataset = AudioNoiseDataset(corpus, plan)
    found = []
    for step in range(plan.steps_per_epoch):
        batch = dataset[step, 0]
        feats, feat_lens = model.features(batch.audio, batch.audio_len)
        tokens = model.quantizer(feats)[..., 0]
        stacks = feats.unflatten(2, (-1, factor)).permute(0, 2, 3, 1).flatten(2)
        found += [(stacks[i, : n // factor], tokens[i, : n // factor]) for i, n in enumerate(feat_lens.tolist())]
    return found


def pairs(data: list[Pair], offsets: tuple[int, ...]) -> Pair:
    """Returns the concatenated features at the offsets from each token, and the tokens."""
    before, after = max(0, -min(offsets)), max(0, max(offsets))
    inputs, targets = [], []
    for stacks, tokens in data:
        end = len(tokens) - after
        if end > before:
            inputs.append(torch.cat([stacks[before + o : end + o] for o in offsets], dim=1))
            targets.append(tokens[before:end])
    return torch.cat(inputs), torch.cat(targets)


def measure(train: Pair, held_out: Pair) -> tuple[float, float, float]:
    """Returns entropy, cross-entropy of the frequencies and best cross-entropy of the network, held out, in nats."""
    torch.manual_seed(0)
    (inputs, targets), (held_inputs, held_targets) = train, held_out
    shares = (torch.bincount(targets, minlength=512) + 0.1) / (len(targets) + 51.2)
    unigram = -shares.log()[held_targets].mean().item()
    own = torch.bincount(held_targets, minlength=512) / len(held_targets)
    entropy = -torch.special.xlogy(own, own).sum().item()
    net = nn.Sequential(
        *(nn.Linear(inputs.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 512))
    )
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    best = float("inf")
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(inputs)).split(BATCH):
            loss = F.cross_entropy(net(inputs[indices]), targets[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            best = min(best, F.cross_entropy(net(held_inputs), held_targets).item())
    return entropy, unigram, best


if __name__ == "__main__":
    sys.exit(main())
