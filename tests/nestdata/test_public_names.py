import subprocess
import sys

import pytest

import nestdata
import nestmodel


@pytest.mark.parametrize("package", [nestdata, nestmodel], ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(package, name)] == []


def test_importing_the_packages_imports_nothing_heavy() -> None:
    program = """
import sys
import nestdata, nestmodel
heavy = {"numpy", "torch", "lhotse", "matplotlib", "sklearn", "pytorch_lightning", "silero_vad", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
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
