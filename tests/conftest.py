import signal
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.synthesis import banked_noise, messy_noise, messy_speech, windowed_speech

# The same examples in every run, however slow the machine; `--hypothesis-profile default` searches for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")

# A run in the background of a shell ignores Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With more threads than free cores, an operation on a small tensor waits longer for its threads than it computes.
torch.set_num_threads(1)


@dataclass(frozen=True)
class MessyCorpora:
    """Where the corpora of `tests.synthesis` lie: as many ways of loading as there are, in one speech corpus."""

    speech: Path
    noise: Path
    windows: Path
    """More speech: windows of long recordings, one of which has broken."""

    banked: Path
    """The noise, as a sample bank."""


@pytest.fixture(scope="session")
def messy_corpora(tmp_path_factory: pytest.TempPathFactory) -> MessyCorpora:
    directory = tmp_path_factory.mktemp("messy")
    return MessyCorpora(
        speech=messy_speech(directory).path,
        noise=messy_noise(directory).path,
        windows=windowed_speech(directory).path,
        banked=banked_noise(directory).path,
    )
