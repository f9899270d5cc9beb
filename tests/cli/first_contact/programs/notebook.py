"""What objects show of themselves, and what they say to wrong types."""

from collections.abc import Callable

from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer, prepare_corpus
from nestmodel import load_network


def attempt(call: Callable[[], object]) -> None:
    try:
        print("no error:", call())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


corpus = Corpus.open("speech.corpus")
plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10, microbatches_per_step=1))
dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open("noise.corpus")), SpeakerNoiseMixer())
network = load_network("last.ckpt")
for shown in (corpus, plan, dataset[0, 0], dataset, network):
    print(f"{type(shown).__name__}: short {len(repr(shown)) < 200}")
attempt(lambda: Corpus.open("speech.json"))
attempt(lambda: prepare_corpus(17, "my.corpus"))  # type: ignore[arg-type]
attempt(lambda: BatchPlan.of(17, PlanConfig()))  # type: ignore[arg-type]
attempt(lambda: dataset["first"])  # type: ignore[index]
attempt(lambda: load_network(17))  # type: ignore[arg-type]
