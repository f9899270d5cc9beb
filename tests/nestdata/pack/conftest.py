from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def speech(demo_speech: Path) -> Path:
    """The corpus of the demo's speech."""
    return demo_speech


@pytest.fixture(scope="session")
def packed(demo_packed: Path) -> Path:
    """The demo's speech as Shar."""
    return demo_packed
