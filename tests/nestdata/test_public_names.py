import subprocess
import sys

import pytest

import nestdata
import nestmodel

TYPE_ALIASES = {
    "AudioInput",
    "AudioInputs",
    "Channel",
    "CorpusInput",
    "ExportFormat",
    "FeatureType",
    "InputFormat",
    "PackCodec",
    "ProbeMode",
    "ShortAudio",
    "StartMethod",
    "WeightParts",
}
"""Public names without a docstring of their own."""


@pytest.mark.parametrize("package", [nestdata, nestmodel], ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(package, name)] == []


@pytest.mark.parametrize("package", [nestdata, nestmodel], ids=lambda package: package.__name__)
def test_every_public_name_has_a_docstring(package: object) -> None:
    for name in set(package.__all__) - TYPE_ALIASES:  # type: ignore[attr-defined]
        value = getattr(package, name)
        # nestmodel gives the ConfigError of nestdata.
        assert value.__module__.startswith((f"{package.__name__}.", "nestdata.errors"))  # type: ignore[attr-defined]
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), f"{name} has the docstring that dataclass generates"


def test_importing_the_packages_imports_nothing_heavy() -> None:
    program = """
import sys
import nestdata, nestmodel
heavy = {"numpy", "torch", "lhotse", "matplotlib", "sklearn", "pytorch_lightning", "silero_vad", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_importing_nestdata_changes_no_random_state_and_imports_no_trainer() -> None:
    program = """
import random, sys
import numpy, torch
states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
import nestdata
for name in nestdata.__all__:
    getattr(nestdata, name)
assert (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()) == states
assert "pytorch_lightning" not in sys.modules and "nestmodel" not in sys.modules and "nestcli" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
