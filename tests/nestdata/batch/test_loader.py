import gc
import itertools
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nestdata import AudioNoiseBatch, AudioNoiseDataset, CorpusError, MicrobatchKey, StartMethod, microbatches
from nestdata.batch.batch import SlotRing
from nestdata.batch.loader import _SlotSampler
from tests.batches import STEPS_WITH_ALL_SHAPES, digest, full_dataset, messy_dataset
from tests.conftest import MessyCorpora

pytestmark = [
    pytest.mark.multiprocess,
    # Workers are started on any machine. PyTorch warns on machines with fewer cores; newer Pythons warn of forks.
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded.*fork"),
]

WARNING = "slots of shared memory hold batches that are still in use"


class Messy(NamedTuple):
    """A dataset, and its batches of two epochs as this process loads them."""

    dataset: AudioNoiseDataset
    indices: list[MicrobatchKey]
    digests: list[dict[str, str]]


@pytest.fixture(scope="module")
def messy(messy_corpora: MessyCorpora) -> Messy:
    dataset = messy_dataset(messy_corpora.speech, messy_corpora.noise)
    indices = microbatches(dataset.plan, num_steps=2 * dataset.plan.steps_per_epoch)
    return Messy(dataset, indices, [digest(dataset[index]) for index in indices])


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_batches_are_the_same_with_every_start_method_and_both_ways_of_handing_over(
    messy: Messy, start_method: StartMethod
) -> None:
    num_workers = 2 if start_method == "fork" else 1  # other workers start slowly
    for num_slots in (None, 0):
        loader = messy.dataset.loader(
            messy.indices, num_workers=num_workers, start_method=start_method, num_slots=num_slots
        )
        assert [digest(batch) for batch in loader] == messy.digests


def test_a_consumer_that_drops_its_batches_gets_all_of_them_from_slots(
    messy: Messy, caplog: pytest.LogCaptureFixture
) -> None:
    loader = messy.dataset.loader(messy.indices, num_workers=2)
    for _ in range(2):  # the second time with the same memory
        kept: list[AudioNoiseBatch] = []
        for batch, expected in zip(loader, messy.digests, strict=True):
            kept = [*kept, batch][-3:]
            assert digest(batch) == expected
            assert not batch.audio.is_shared()  # the tensor was not sent by torch
    assert WARNING not in caplog.text
    ring = loader._ring
    assert ring is not None
    del batch, kept
    gc.collect()
    assert ring.num_free == ring.num_slots == 2 * 2 + 4


def test_batches_that_are_kept_are_not_overwritten_and_a_warning_says_so_once(
    messy: Messy, caplog: pytest.LogCaptureFixture
) -> None:
    batches = list(messy.dataset.loader(messy.indices, num_workers=2, num_slots=5))
    assert [digest(batch) for batch in batches] == messy.digests
    assert len([record for record in caplog.records if WARNING in record.message]) == 1
    assert sum(batch.audio.is_shared() for batch in batches) == len(batches) - 5


def test_one_kept_row_protects_its_batch(messy: Messy) -> None:
    batches = iter(messy.dataset.loader(messy.indices, num_workers=1))
    row = next(batches).noisy_audio[1, 10:]
    expected = row.clone()
    for batch in batches:
        assert torch.equal(row, expected)
        batch.noisy_audio.zero_()  # a consumer may write to its batch


def test_an_iteration_that_is_given_up_does_not_disturb_the_next_one(messy: Messy) -> None:
    loader = messy.dataset.loader(messy.indices, num_workers=2)
    for number in (1, 3, len(messy.digests)):
        loaded = [digest(batch) for batch in itertools.islice(loader, number)]
        assert loaded == messy.digests[:number]


def test_memory_is_used_again_only_if_no_worker_may_still_write_to_it(messy: Messy) -> None:
    loader = messy.dataset.loader(messy.indices, num_workers=1)
    for _ in range(2):
        # Ends after the last batch without asking for another one, as Lightning does.
        assert [digest(batch) for _, batch in zip(messy.indices, loader, strict=False)] == messy.digests
        ring = loader._ring
        assert ring is not None
        gc.collect()
        assert ring.num_free == ring.num_slots
    next(iter(loader))
    assert loader._ring is None


def test_two_iterations_of_one_loader_do_not_share_slots(messy: Messy) -> None:
    loader = messy.dataset.loader(messy.indices, num_workers=1)
    for first, second, expected in zip(loader, loader, messy.digests, strict=True):
        assert digest(first) == digest(second) == expected


@pytest.mark.slow
def test_the_largest_batch_fills_its_slot(messy_corpora: MessyCorpora) -> None:
    full = full_dataset(messy_corpora.speech, messy_corpora.windows, messy_corpora.banked)
    batch_indices = microbatches(full.plan, num_steps=STEPS_WITH_ALL_SHAPES)
    loader = full.loader(batch_indices, num_workers=1)
    assert all(not batch.audio.is_shared() for batch in loader)


def test_an_error_in_a_worker_is_raised_by_name_and_ends_all_workers_at_once(messy: Messy) -> None:
    others = {process.pid for process in multiprocessing.active_children()}
    with pytest.raises(IndexError, match="step 0, microbatch 99") as caught:
        # The second batch comes from the second worker, so that both have started when the third is wrong.
        list(messy.dataset.loader([(0, 0), (0, 1), (0, 99), *[(1, 0)] * 8], num_workers=2))
    # The traceback keeps the iterator, and its workers would wait for work until the process exits.
    workers = [process for process in multiprocessing.active_children() if process.pid not in others]
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    assert caught.tb is not None


@pytest.mark.slow
def test_a_corpus_that_is_cut_off_while_workers_read_it_is_named(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    speech = Path(shutil.copytree(messy_corpora.speech, tmp_path / "speech.corpus"))
    dataset = messy_dataset(speech, messy_corpora.noise)
    batches = iter(dataset.loader(microbatches(dataset.plan, num_steps=20), num_workers=1, start_method="fork"))
    next(batches)
    os.truncate(speech / "cuts.jsonl", 0)  # the worker dies of SIGBUS
    with pytest.raises(CorpusError, match=r"speech\.corpus: the corpus is damaged"):
        list(batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
@pytest.mark.parametrize(("num_workers", "num_slots"), [(0, None), (2, None), (2, 0)])
def test_batches_are_page_locked_and_reach_the_gpu_unchanged(
    messy: Messy, num_workers: int, num_slots: int | None
) -> None:
    found = []
    for batch in messy.dataset.loader(messy.indices, num_workers=num_workers, pin_memory=True, num_slots=num_slots):
        # A tensor without elements has no memory.
        assert [name for name, one in batch.tensors().items() if one.numel() and not one.is_pinned()] == []
        moved = batch.to("cuda", non_blocking=True)
        del batch
        found.append(digest(moved.to("cpu")))
    assert found == messy.digests


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_page_locked_memory_is_a_warning_without_a_gpu_and_a_loader_draws_no_number_of_torch(
    messy: Messy, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_rng_state()
    loader = messy.dataset.loader(messy.indices[:2], num_workers=num_workers, pin_memory=True)
    assert [digest(batch) for batch in loader] == messy.digests[:2]
    assert "pin_memory has no effect" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)


def test_every_index_is_sent_with_the_next_ones_of_its_worker_and_no_further() -> None:
    taken = 0

    def indices() -> Iterator[tuple[int, int]]:
        nonlocal taken
        for step in range(100):
            taken = step + 1
            yield step, 0

    def of(*steps: int) -> tuple[tuple[int, int], ...]:
        return tuple((step, 0) for step in steps)

    sent = iter(_SlotSampler(indices(), None, num_ahead=2, num_workers=3))
    assert [next(sent) for _ in range(2)] == [((0, 0), None, of(3, 6)), ((1, 0), None, of(4, 7))]
    assert taken <= 9
    *_, third_last, _, last = sent
    assert (third_last, last) == (((97, 0), None, ()), ((99, 0), None, ()))
    without_workers = _SlotSampler(indices(), None, num_ahead=2)
    assert next(iter(without_workers)) == ((0, 0), None, of(1, 2))
    local = iter(_SlotSampler(indices(), None))
    assert next(local) == ((0, 0), None, ())
    assert taken == 1


def test_a_slot_is_free_only_when_nothing_refers_to_its_memory() -> None:
    ring = SlotRing(1, 4096)
    slot = ring.acquire()
    assert slot == 0
    tensor = ring.tensor(slot)
    view = tensor[64:128].view(torch.float32)
    kept = [tensor, view, view.numpy()[3:], view.reshape(4, 4)[1].detach()]
    del tensor, view
    while kept:
        assert ring.num_free == 0
        assert ring.acquire() is None
        kept.pop(0)
    gc.collect()
    assert ring.acquire() == 0


def test_a_ring_closes_its_file() -> None:
    ring = SlotRing(1, 4096)
    file = ring._file
    assert os.fstat(file).st_size == 4096
    del ring
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
