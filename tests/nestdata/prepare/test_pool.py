import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from nestdata import ConfigError, CorpusError, ManifestError
from nestdata.prepare import pool
from nestdata.prepare.pool import open_pool

REPOSITORY = Path(__file__).parents[3]


def new_children(before: Sequence[BaseProcess]) -> list[BaseProcess]:
    """Returns the processes started since, because those of a test that ran earlier may still be ending."""
    return [child for child in multiprocessing.active_children() if child not in before]


def square(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def refuse(number: int) -> int:
    if number == 3:
        raise ManifestError("m.json:3: not JSON.")
    return number


def end_process(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.multiprocess
def test_several_jobs_return_their_results_in_order() -> None:
    before = multiprocessing.active_children()
    with open_pool(3) as jobs:
        results = list(jobs.map(square, range(200)))
        assert [result for result, _ in results] == [n**2 for n in range(200)]
        assert os.getpid() not in {process for _, process in results}
        assert list(jobs.map(square, [])) == []
    assert new_children(before) == []


@pytest.mark.multiprocess
def test_tasks_are_taken_only_as_fast_as_they_are_processed() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(1, 101):
            taken = number
            yield number

    with open_pool(2) as jobs:
        for number, (result, _) in enumerate(jobs.map(square, tasks()), start=1):
            assert result == number**2
            assert taken <= number + 4
    assert taken == 100


@pytest.mark.multiprocess
def test_an_error_in_a_worker_is_raised_in_the_caller_and_ends_all_workers() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(ManifestError, match=r"m\.json:3: not JSON\."), open_pool(2) as jobs:
        list(jobs.map(refuse, range(10)))
    assert new_children(before) == []


@pytest.mark.multiprocess
def test_a_killed_worker_is_an_error_that_says_so() -> None:
    with pytest.raises(CorpusError, match=r"ended unexpectedly.*--jobs"), open_pool(2) as jobs:
        list(jobs.map(end_process, range(10)))


def test_without_dask_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"pip install 'nest-pretrain\[dask\]'"), open_pool(1, "tcp://host:8786"):
        pass


def test_an_address_without_a_scheduler_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    address = "tcp://127.0.0.1:1"
    monkeypatch.setattr(pool, "_DASK_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=f"no Dask scheduler answers at {address} "), open_pool(1, address):
        pass
