"""Loads programs that are not in a package, such as those of examples/ and recipes/."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[1]


def load_script(path: Path) -> ModuleType:
    """Runs a program as a module whose name is not `__main__`, and returns it."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_example(name: str) -> ModuleType:
    """Loads a program with its folder on the path, as when it is run."""
    path = REPOSITORY / "examples" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        return load_script(path)
