import pickle
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from nestdata import (
    AudioNoiseDataset,
    BadAudioConfig,
    BatchPlan,
    ConfigError,
    Corpus,
    PlanConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)
from tests.conftest import MessyCorpora
from tests.synthesis import hiss, write_audio, write_jsonl


def labelled_corpus(directory: Path, draw: random.Random, labels: dict[bytes, dict[str, str]]) -> Corpus:
    """Prepares random audio, adds the labels of each cut by the bytes of its first samples, and removes some files."""
    rows = []
    for number in range(draw.randrange(8, 30)):
        seconds, name = draw.uniform(0.3, 3.0), f"{number}.wav"
        samples = hiss(round(seconds * 16000), draw.randrange(1 << 30))
        write_audio(directory / name, samples, subtype="FLOAT")
        own = {
            "text": f"{directory.name} says {number}",
            "speaker": f"s{draw.randrange(4)}",
            "lang": directory.name,
            "take": f"t{number}",
        }
        rows.append({"audio_filepath": name, "duration": len(samples) / 16000, **own})
        labels[samples[:1000].tobytes()] = own
    prepare_corpus([write_jsonl(directory / "rows.json", rows)], directory.with_suffix(".corpus"))
    for row in draw.sample(rows, len(rows) // 8):
        (directory / str(row["audio_filepath"])).unlink()
    return Corpus.open(directory.with_suffix(".corpus"))


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("seed", range(3))
def test_the_labels_of_a_row_are_those_of_the_audio_in_it(tmp_path: Path, seed: int) -> None:
    draw, labels = random.Random(seed), dict[bytes, dict[str, str]]()
    corpora = [labelled_corpus(tmp_path / name, draw, labels) for name in ("en", "sw")]
    config = PlanConfig(
        max_batch_seconds=9.0, microbatches_per_step=2, weights=(1.0, draw.uniform(0.1, 5.0)), seed=seed
    )
    plan = BatchPlan.of(corpora, config)
    dataset = AudioNoiseDataset(corpora, plan, mixer=SpeakerNoiseMixer(), bad_audio=BadAudioConfig(max_share=1.0))
    indices = microbatches(plan, num_steps=2 * plan.steps_per_epoch)
    in_this_process, num_replaced = list(dataset.loader(indices)), 0
    for num_workers in (0, 2):
        # With two slots of shared memory, some batches come by pickle.
        for expected, batch in zip(
            in_this_process, dataset.loader(indices, num_workers=num_workers, num_slots=2), strict=True
        ):
            assert batch.indices == expected.indices
            num_replaced += len(batch.bad_cuts)
            for form in (batch, pickle.loads(pickle.dumps(batch)).to("cpu")):
                for row, cut in enumerate(dataset.cuts(form)):
                    own = labels[form.audio[row, :1000].numpy().tobytes()]
                    (told,) = cut.supervisions
                    assert [told.text, told.speaker, told.language, cut.custom["take"]] == list(own.values())
    assert num_replaced > 0
    assert len({index for batch in in_this_process for index in batch.indices}) < sum(map(len, corpora))


def test_a_batch_of_another_dataset_has_no_cuts_here(messy_corpora: MessyCorpora) -> None:
    plans = {path: BatchPlan.of(path) for path in (messy_corpora.speech, messy_corpora.windows)}
    speech, windows = (AudioNoiseDataset(path, plan) for path, plan in plans.items())
    for batch, other in ((speech[0], windows), (windows[0], speech)):
        with pytest.raises(
            ConfigError, match=r"is not from AudioNoiseDataset\(.*ask the dataset that it was loaded from"
        ):
            other.cuts(batch)


def test_a_loader_of_torch_takes_the_batches_of_given_steps_and_no_others(messy_corpora: MessyCorpora) -> None:
    plan = BatchPlan.of(messy_corpora.speech, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=2))
    dataset = AudioNoiseDataset(messy_corpora.speech, plan)
    indices = microbatches(plan, num_steps=3)
    loader: DataLoader[object] = DataLoader(dataset, sampler=indices, batch_size=None)
    for batch, index in zip(loader, indices, strict=True):
        assert torch.equal(batch.audio, dataset[index].audio)
    for use in (len, list, lambda given: list(DataLoader(given)), lambda given: DataLoader(given, shuffle=True)):
        with pytest.raises(TypeError, match=r"use dataset\.loader\(microbatches.*, not DataLoader\(dataset\)"):
            use(dataset)
    assert dataset
