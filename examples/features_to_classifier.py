"""Trains a language classifier on encoder features: here of an untrained encoder, on the demo corpus."""

import sys
import tempfile
from pathlib import Path

import torch

from nestdata import Corpus, prepare_corpus
from nestmodel import NestConfig, NestNetwork, iterate_features

DEMO = Path(__file__).parents[1] / "manifests" / "demo"


def main(num_steps: int = 200) -> float:
    """Returns the accuracy on the training utterances, between 0 and 1."""
    network = NestNetwork(NestConfig.preset("demo"))  # load_network("last.ckpt") for a trained encoder
    features, languages = [], []
    with tempfile.TemporaryDirectory() as directory:
        prepare_corpus([DEMO / "speech.json"], Path(directory, "speech"))
        for utterance in iterate_features(network, Corpus.open(Path(directory, "speech")), layers="last"):
            frames = torch.from_numpy(utterance.values[0])  # (enc_frames, dim)
            features.append(torch.cat([frames.mean(0), frames.std(0)]))
            languages.append(utterance.line["supervisions"][0]["language"])
    classes = sorted(set(languages))
    inputs = torch.stack(features)
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-5)
    targets = torch.tensor([classes.index(language) for language in languages])

    torch.manual_seed(0)
    classifier = torch.nn.Linear(inputs.shape[1], len(classes))
    optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-2)
    for _ in range(num_steps):
        loss = torch.nn.functional.cross_entropy(classifier(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (classifier(inputs).argmax(1) == targets).float().mean().item()
    sys.stdout.write(f"{len(targets)} utterances, {len(classes)} languages: {100 * accuracy:.0f} % correct\n")
    return accuracy


if __name__ == "__main__":
    main()
