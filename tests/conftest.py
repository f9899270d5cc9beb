from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.synthesis import messy_noise, messy_speech

# With more threads than free cores, an operation on a small tensor waits longer for its threads than it computes.
torch.set_num_threads(1)


@dataclass(frozen=True)
class MessyCorpora:
    """Where the corpora of `tests.synthesis` lie: as many ways of loading as there are, in one speech corpus."""

    speech: Path
    noise: Path


@pytest.fixture(scope="session")
def messy_corpora(tmp_path_factory: pytest.TempPathFactory) -> MessyCorpora:
    directory = tmp_path_factory.mktemp("messy")
    return MessyCorpora(speech=messy_speech(directory).path, noise=messy_noise(directory).path)
