"""Settings of every test run, the corpora that many tests share, and how parallel workers divide the tests.

Imports none of the packages at module level: jaxtyping has to install its import hook first.
"""

import gc
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# The same examples in every run, however slow the machine; `--hypothesis-profile default` searches for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")

# A shell starts background jobs with SIGINT ignored, and every process that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SERIAL = "serial"
SERIAL_TESTS = ("tests/nestguard/", "tests/distributed/", "tests/cli/test_preflight.py")
"""Tests that start several processes with time limits: one worker runs all of them, so no two run at a time."""

NUMERICS = (
    "tests/golden/",
    "tests/distributed/test_world_sizes.py",
    "tests/nestdata/batch/",
    "tests/nestdata/audio/test_decode.py",
    "tests/nestdata/corpus/test_bank.py",
    "tests/nestdata/plan/",
    "tests/nestdata/test_stateless_rng.py",
    "tests/nestmodel/evaluate/",
    "tests/nestmodel/formats/test_huggingface.py",
    "tests/nestmodel/formats/test_nemo_archive.py",
    "tests/nestmodel/nn/",
    "tests/nestmodel/training/test_module.py",
    "tests/nestmodel/training/test_resume_checks.py",
)
"""Tests that compare numbers or bytes that an instruction set could change: all of them are marked `numerics`."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Limits torch to one thread, in processes that run tests.

    With more threads than free cores, an operation on a small tensor waits longer for its threads than it computes.
    The process that starts the workers of `pytest -n` does without torch, because they wait for it.
    """
    assert all((session.config.rootpath / path).exists() for path in (*NUMERICS, *SERIAL_TESTS)), "a path is gone"
    if not session.config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(NUMERICS):
            item.add_marker(pytest.mark.numerics)
    if hasattr(config, "workerinput"):
        _sort_by_length(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_collection_finish() -> None:
    """Saves time in all tests that follow.

    What was imported and collected is exempt from garbage collection, which would search all of it each time. The two
    functions that are called most are exempt from the checks of annotations, which cost many times the functions.
    """
    gc.freeze()
    if "nestdata.stateless_rng" in sys.modules:
        from nestdata import stateless_rng

        for function in (stateless_rng._mix, stateless_rng._mix_array):
            function.__no_type_check__ = True  # type: ignore[attr-defined]


def _sort_by_length(items: list[pytest.Item]) -> None:
    """Moves long groups of tests to the front, so that all workers finish at about the same time.

    The serial tests take longest. Modules with slow tests follow, then those with many tests.
    """
    scopes = [_scope_of(item.nodeid) for item in items]
    sizes = Counter(scopes)
    slow = {scope for scope, item in zip(scopes, items, strict=True) if item.get_closest_marker("slow")}
    order = {scope: (scope != SERIAL, scope not in slow, -size) for scope, size in sizes.items()}
    items.sort(key=lambda item: order[_scope_of(item.nodeid)])


def _scope_of(nodeid: str) -> str:
    """Returns the group of a test: one worker runs all tests of a group."""
    path = nodeid.split("::", 1)[0]
    return SERIAL if path.startswith(SERIAL_TESTS) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives whole modules to the workers of `pytest -n`, so that each module's fixtures are made once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope_of(nodeid)

    config.option.loadscopereorder = False  # pytest_collection_modifyitems sorts the tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _restored_signals() -> Iterator[None]:
    """Undoes what training sets and leaves: processes that later tests start would inherit ignored signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def restored_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what Lightning and `prepare_deterministic` set: environment variables and torch's global flags."""
    import torch

    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@dataclass(frozen=True)
class MessyCorpora:
    """Paths of the corpora of `tests.synthesis`, whose cuts exercise every way of loading."""

    speech: Path
    noise: Path
    windows: Path
    """More speech: windows of long recordings, one of which is broken."""

    banked: Path
    """The noise, as a sample bank."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """An open browser; tests are skipped without one. It ends with its module, since playwright runs an event loop."""
    from tests.browsers import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def messy_corpora(tmp_path_factory: pytest.TempPathFactory) -> MessyCorpora:
    from tests.synthesis import banked_noise, messy_noise, messy_speech, windowed_speech

    directory = tmp_path_factory.mktemp("messy")
    return MessyCorpora(
        speech=messy_speech(directory).path,
        noise=messy_noise(directory).path,
        windows=windowed_speech(directory).path,
        banked=banked_noise(directory).path,
    )


@pytest.fixture(scope="session")
def demo_speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the demo's speech: 40 FLAC files of 16 bits."""
    from nestdata import prepare_corpus
    from tests.nestdata.pack.packing import DEMO

    corpus = tmp_path_factory.mktemp("demo") / "speech.corpus"
    prepare_corpus([DEMO / "speech.json"], corpus)
    return corpus


@pytest.fixture(scope="session")
def demo_packed(demo_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's speech as Shar of several shards; not to be changed."""
    from tests.nestdata.pack.packing import pack

    output = tmp_path_factory.mktemp("demo") / "packed"
    pack(demo_speech, output)
    return output
