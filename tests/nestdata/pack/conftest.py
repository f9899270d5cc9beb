from pathlib import Path

import pytest

from nestdata import prepare_corpus
from tests.nestdata.pack.packing import DEMO, pack


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the demo's speech: 40 FLAC files of 16 bits."""
    corpus = tmp_path_factory.mktemp("speech") / "speech.corpus"
    prepare_corpus([DEMO / "speech.json"], corpus)
    return corpus


@pytest.fixture(scope="session")
def packed(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's speech as a packed set of several shards; not to be changed."""
    output = tmp_path_factory.mktemp("packed") / "speech"
    pack(speech, output)
    return output
