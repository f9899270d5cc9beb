from dataclasses import replace

import pytest

from nestmodel.preflight.feeding import advise
from nestmodel.preflight.measure.loader_speed import FeedingMeasurement, cores_of_rank

# One worker needs 1 ms for a second of audio, 0.75 ms of it for decoding.
MEASURED = FeedingMeasurement(
    delivered={0: 1250.0, 1: 1000.0, 2: 2000.0},
    step_rate=4000.0,
    num_workers=2,
    num_cores=2,
    decode_s=0.00075,
    bank_s=0.00005,
    stored_bytes=16000.0,
    bank_bytes=32000.0,
    hours_without_bank=10.0,
)


def test_a_loader_that_is_too_slow_is_named_with_the_workers_that_it_needs() -> None:
    advice = advise(MEASURED)
    assert not advice.is_fed
    assert advice.wait_share == 0.5
    assert advice.workers_needed == 5  # 1.2 * 4000 / 1000 = 4.8
    assert advice.notes[0] == (
        "steps take 4,000 audio-s/s; the loader delivers 1,250 with 0 workers, 1,000 with 1 worker, "
        "2,000 with 2 workers (2 cores for this rank)"
    )
    assert advice.notes[1] == (
        "the loader is the bottleneck: with data.num_workers 2 steps wait 50 % of the time; about 5 workers would feed "
        "them, more than the 2 cores of this rank"
    )


def test_pcm_is_estimated_from_the_share_of_decoding_and_pays_if_fewer_workers_feed_the_step() -> None:
    advice = advise(MEASURED)
    assert advice.pcm_delivered == pytest.approx(2 / 0.0003)  # 1 ms - 0.75 ms + 0.05 ms for each of two workers
    assert advice.pcm_workers_needed == 2
    assert advice.pcm_pays
    assert advice.notes[2] == (
        "preparing the speech with --pcm would pay: data.num_workers 2 would deliver about 6,667 audio-s/s, 2 workers "
        "would feed the steps, and the speech would take 1.2 GB more"
    )
    assert advice.notes[3].startswith("steps take 64.0 MB/s of speech from the disk as it is stored, 128.0 MB/s")


def test_workers_that_deliver_a_fifth_more_than_steps_take_feed_them() -> None:
    fed = advise(replace(MEASURED, step_rate=1600.0))
    assert fed.is_fed
    assert (fed.wait_share, fed.workers_needed, fed.pcm_pays) == (0.0, 2, False)
    assert fed.notes[1] == "the loader is not the bottleneck: data.num_workers 2 feeds the step"
    assert fed.notes[2].startswith("preparing the speech with --pcm is not needed: ")
    narrow = advise(replace(MEASURED, step_rate=1700.0))
    assert not narrow.is_fed
    assert narrow.wait_share == 0.0
    assert narrow.workers_needed == 3  # 1.2 * 1700 / 1000 = 2.04
    assert "data.num_workers 2 delivers less than 1.2 times what steps take" in narrow.notes[1]
    assert advise(replace(MEASURED, step_rate=500.0)).notes[1].endswith("feeds the step; 1 would do")


def test_without_workers_loading_and_steps_take_turns() -> None:
    alone = advise(replace(MEASURED, num_workers=0, step_rate=1250.0))
    assert alone.wait_share == pytest.approx(0.5)
    assert not alone.is_fed
    assert advise(replace(MEASURED, num_workers=0, step_rate=50.0)).is_fed  # 4 % of the time is spent on loading
    assert advise(replace(MEASURED, num_workers=0, step_rate=50.0)).workers_needed == 0


def test_decoding_that_takes_longer_than_a_worker_leaves_at_least_the_time_to_read() -> None:
    assert advise(replace(MEASURED, decode_s=1.0)).pcm_delivered == pytest.approx(2 / 0.00005)


def test_speech_that_was_prepared_with_pcm_needs_no_advice_about_it() -> None:
    advice = advise(replace(MEASURED, hours_without_bank=0.0))
    assert not advice.pcm_pays
    assert advice.notes[2] == "the speech was prepared with --pcm already"


def test_ranks_of_a_node_share_the_cores_that_several_of_them_may_use() -> None:
    assert cores_of_rank([["a", [0, 1, 2, 3]]] * 2 + [["b", [0, 1]]], 0) == 2
    assert cores_of_rank([["a", [0, 1, 2, 3]]] * 2 + [["b", [0, 1]]], 2) == 2
    assert cores_of_rank([["a", [0, 1]], ["a", [2, 3]]], 1) == 2  # bound to cores of their own
    assert cores_of_rank([["a", [0, 1]], None], 0) == 2
    assert cores_of_rank([["a", [0]]] * 4, 3) == 1
    assert cores_of_rank([["a", list(range(6))]] * 3, 0) == 2
    assert cores_of_rank([["a", list(range(192))]] * 6, 0) == 32
