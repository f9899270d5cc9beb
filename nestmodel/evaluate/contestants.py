"""The feature sets that probes compare: those of the trained encoder, and two baselines."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, get_args

from nestdata import Corpus
from nestmodel.evaluate.encode import OnReject, Utterance, iterate_features, iterate_stacked_mels
from nestmodel.nn.network import NestNetwork

Contestant = Literal["trained", "untrained", "log_mel"]
"""`trained`: all layers of the encoder. `untrained`: the same of an encoder with initial random weights, which reads
the same input, so the difference was learned. `log_mel`: the normalised log-mel frames that both encoders read, stacked
to encoder frames."""

CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)

BASELINES: tuple[Contestant, ...] = ("untrained", "log_mel")

Reader = Callable[[Corpus, list[int], OnReject], Iterator[Utterance]]
"""Yields the features of the utterances of a corpus with the given indices, longest first."""


def untrained_network(model: NestNetwork, seed: int) -> NestNetwork:
    """Returns a network of the same architecture with initial weights that are drawn from a seed."""
    return NestNetwork(replace(model.config, seed=seed))


def contestant_reader(
    name: Contestant, model: NestNetwork, *, seed: int, max_batch_seconds: float, device: str
) -> Reader:
    """Returns a function that reads the features of a contestant.

    Args:
        name: The contestant.
        model: The trained network.
        seed: Determines the weights of the untrained encoder.
        max_batch_seconds: Seconds of audio in a batch, padding included.
        device: Device of the encoders.
    """
    if name == "log_mel":
        return lambda corpus, rows, on_reject: iterate_stacked_mels(
            model, corpus, max_batch_seconds, device, rows=rows, on_reject=on_reject
        )
    network = untrained_network(model, seed) if name == "untrained" else model
    return lambda corpus, rows, on_reject: iterate_features(
        network, corpus, "all", max_batch_seconds, device, rows=rows, on_reject=on_reject
    )


def contestant_name(name: Contestant) -> str:
    """Returns the name of a contestant in tables."""
    return name.replace("_", "-")
