"""Features by several ranks and several runs, in one process: what is kept, what is computed again, who is named."""

import json
import random
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestmodel import ExtractConfig, ExtractError, ExtractReport, NestModel, extract_features, extract_share
from nestmodel.evaluate import extract, extract_ranks
from nestmodel.evaluate.encode import encode_batch
from nestmodel.evaluate.extract_ranks import FeatureFolder, FinishedBatch, Ranks, keep_records, read_records
from nestmodel.evaluate.inputs import RejectedUtterance
from tests.synthesis import hiss, write_audio
from tests.training import tiny_config

CONFIG = ExtractConfig(device="cpu", max_batch_seconds=0.5)
"""Two utterances in a batch."""

NUM_BATCHES = 4


@pytest.fixture(scope="module")
def model() -> NestModel:
    return NestModel(tiny_config())


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for number in range(2 * NUM_BATCHES):
        write_audio(tmp_path / "in" / f"{number}.wav", hiss(3300 + 80 * number, number))
    prepare_corpus([tmp_path / "in"], tmp_path / "in.corpus", PrepareConfig(min_seconds=0.0))
    return Corpus.open(tmp_path / "in.corpus")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The batches that are computed. Ctrl-C interrupts the third one after its first utterance."""
    batches: list[list[int]] = []

    def encode(corpus: Corpus, batch: list[int], *arguments: Any) -> Iterator[Any]:
        batches.append(batch)
        utterances = encode_batch(corpus, batch, *arguments)
        if len(batches) == 3:
            yield next(utterances)
            raise KeyboardInterrupt
        yield from utterances

    monkeypatch.setattr(extract, "encode_batch", encode)
    return batches


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def in_two_ranks(model: NestModel, corpus: Corpus, output: Path, other: ExtractConfig = CONFIG) -> ExtractReport:
    """Runs rank 0 here, and rank 1 with other settings in a thread."""
    errors: list[Exception] = []

    def share() -> None:
        try:
            extract_share(deepcopy(model), corpus, output, other, rank=1, num_ranks=2)
        except ExtractError as error:
            errors.append(error)

    thread = threading.Thread(target=share)
    thread.start()
    try:
        return extract_features(model, corpus, output, CONFIG, num_ranks=2)
    finally:
        thread.join()
        if errors:
            raise errors[0]


def interrupt(model: NestModel, corpus: Corpus, output: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        extract_features(model, corpus, output, CONFIG)
    assert not output.exists()


def test_an_interrupted_run_goes_on_with_the_batches_that_are_missing(
    model: NestModel, corpus: Corpus, tmp_path: Path, begun: list[list[int]]
) -> None:
    interrupt(model, corpus, tmp_path / "f")
    report = extract_features(model, corpus, tmp_path / "f", CONFIG)
    assert report.num_utterances == 2 * NUM_BATCHES
    assert begun == [[7, 6], [5, 4], [3, 2], [3, 2], [1, 0]]
    extract_features(model, corpus, tmp_path / "g", CONFIG)
    assert contents(tmp_path / "f") == contents(tmp_path / "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "g", "in", "in.corpus"]


@pytest.mark.parametrize("change", ["dtype", "weights", "audio"])
def test_with_another_setting_model_or_input_it_starts_over(
    change: str, model: NestModel, corpus: Corpus, tmp_path: Path, begun: list[list[int]]
) -> None:
    interrupt(model, corpus, tmp_path / "f")
    config = CONFIG
    if change == "dtype":
        config = ExtractConfig(device="cpu", max_batch_seconds=0.5, dtype="float16")
    elif change == "weights":
        model = deepcopy(model)
        with torch.no_grad():
            next(model.encoder.parameters()).mul_(1.001)
    else:
        write_audio(tmp_path / "in" / "0.wav", hiss(3290, 0))
        prepare_corpus([tmp_path / "in"], tmp_path / "in.corpus", PrepareConfig(min_seconds=0.0), overwrite=True)
        corpus = Corpus.open(tmp_path / "in.corpus")
    extract_features(model, corpus, tmp_path / "f", config)
    assert begun[3:] == [[7, 6], [5, 4], [3, 2], [1, 0]]
    extract_features(model, corpus, tmp_path / "g", config)
    assert contents(tmp_path / "f") == contents(tmp_path / "g")


def test_audio_that_was_missing_for_a_while_is_read_again(
    model: NestModel, corpus: Corpus, tmp_path: Path, begun: list[list[int]]
) -> None:
    audio = tmp_path / "in" / "7.wav"
    audio.rename(tmp_path / "away.wav")
    interrupt(model, corpus, tmp_path / "f")
    (tmp_path / "away.wav").rename(audio)
    report = extract_features(model, corpus, tmp_path / "f", CONFIG)
    assert begun[3:] == [[7, 6], [3, 2], [1, 0]]
    assert (report.num_utterances, report.left_out) == (2 * NUM_BATCHES, {})


def test_audio_that_has_gone_since_leaves_no_features(
    model: NestModel, corpus: Corpus, tmp_path: Path, begun: list[list[int]]
) -> None:
    interrupt(model, corpus, tmp_path / "f")
    assert len(list((tmp_path / "f.partial" / "features").iterdir())) == 5
    (tmp_path / "in" / "3.wav").unlink()
    report = extract_features(model, corpus, tmp_path / "f", CONFIG)
    assert begun[3:] == [[3, 2], [1, 0]]
    assert (report.num_utterances, report.left_out) == (7, {"missing": 1})
    extract_features(model, corpus, tmp_path / "g", CONFIG)
    assert contents(tmp_path / "f") == contents(tmp_path / "g")


def test_two_ranks_equal_one_and_a_rank_with_other_settings_is_refused(
    model: NestModel, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_ranks, "SILENCE_S", 5.0)
    extract_features(model, corpus, tmp_path / "one", CONFIG)
    assert in_two_ranks(model, corpus, tmp_path / "two").num_utterances == 2 * NUM_BATCHES
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    other = ExtractConfig(device="cpu", max_batch_seconds=0.5, dtype="float16")
    with pytest.raises(ExtractError, match="rank 1 of 2 has another dtype than rank 0"):
        in_two_ranks(model, corpus, tmp_path / "three", other)


def test_a_rank_without_a_sign_of_life_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_ranks, "SILENCE_S", 0.1)
    with Ranks(tmp_path, 0, 3) as ranks, pytest.raises(ExtractError, match="rank 1 of 3 has given no sign of life"):
        ranks.start({}, [])
    with Ranks(tmp_path, 2, 3) as ranks, pytest.raises(ExtractError, match="rank 0 of 3 has given no sign of life"):
        ranks.wait_for_start()


def test_records_are_read_in_the_order_of_the_batches_without_the_last_line_of_a_killed_rank(tmp_path: Path) -> None:
    rejects = [RejectedUtterance("a.wav", "a", "missing", "a.wav does not exist")]
    records = [FinishedBatch(number, [{"id": "ü"}], [8], 10, rejects if number == 2 else []) for number in range(5)]
    for name, numbers in (("a", (0, 3)), ("b", (1, 2, 3, 4))):
        (tmp_path / name).write_text("".join(records[number].to_line() for number in numbers))
    with (tmp_path / "a").open("a") as file:
        file.write('{"number": 4}\n[4, null]\n\0\0\0\n' + json.dumps(records[4])[:-3])
    assert list(read_records([tmp_path / "a", tmp_path / "b"])) == records


@pytest.mark.parametrize("seed", range(4))
def test_what_a_crash_has_lost_is_computed_again(
    seed: int, model: NestModel, corpus: Corpus, tmp_path: Path, begun: list[list[int]]
) -> None:
    assert begun == []
    interrupt(model, corpus, tmp_path / "f")
    draw, partial = random.Random(seed), tmp_path / "f.partial"
    for path in (*(partial / "features").iterdir(), *(partial / "batches").glob("*.jsonl")):
        damage = draw.choice(["none", "none", "lost", "empty", "short", "torn"])
        if damage == "lost":
            path.unlink()
        elif damage != "none":
            content = path.read_bytes()
            path.write_bytes(content[: {"empty": 0, "short": draw.randrange(len(content) + 1), "torn": -3}[damage]])
    extract_features(model, corpus, tmp_path / "f", CONFIG)
    extract_features(model, corpus, tmp_path / "g", CONFIG)
    assert contents(tmp_path / "f") == contents(tmp_path / "g")


def test_a_rank_of_an_earlier_start_ends_and_writes_nothing_into_a_later_one(tmp_path: Path) -> None:
    with Ranks(tmp_path, 0, 1) as earlier:
        keep_records(tmp_path, {"dtype": "float32"})
        earlier.start({}, [])
        with FeatureFolder(tmp_path / "features") as folder, earlier.records.open("w") as records:
            with Ranks(tmp_path, 0, 1) as later:
                keep_records(tmp_path, {"dtype": "float16"})
                later.check()
                with pytest.raises(ExtractError, match="rank 0 has ended or was started again"):
                    earlier.check()
                with pytest.raises(ExtractError, match="started again or removed"):
                    folder.write("a.npy", b"of the earlier start")
                records.write("a record\n")
                records.flush()
                assert list((tmp_path / "features").iterdir()) == []
                assert [path.name for path in (tmp_path / "batches").glob("*.jsonl")] == ["kept.jsonl"]


def test_of_two_processes_with_one_number_the_first_takes_part(tmp_path: Path) -> None:
    with Ranks(tmp_path, 0, 2) as first, Ranks(tmp_path, 1, 2) as second:
        names = first.start({}, []).names
        with Ranks(tmp_path, 1, 2) as third:
            time.sleep(0.1)
            assert first.start({}, []).names == names == [first.name, second.name]
            assert second.wait_for_start().names == names
            assert third.name not in names
