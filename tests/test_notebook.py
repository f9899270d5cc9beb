"""Executes the notebook in examples/ in a real kernel, and checks what is committed of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.extras import needs

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = REPOSITORY / "examples" / "first_steps.ipynb"


def executed(directory: Path) -> Any:
    """Returns the notebook after a kernel has run all its cells, in a directory beside the demo corpus."""
    import nbformat
    from nbclient import NotebookClient

    (directory / "manifests").symlink_to(REPOSITORY / "manifests")
    (directory / "examples").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(directory / "examples")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook


@pytest.mark.slow
@needs("dev", "nbclient", "ipykernel")
@pytest.mark.filterwarnings("ignore")  # of the kernel's client
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    notebook = executed(tmp_path)  # raises if a cell does
    committed = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    kinds = [[sorted(output.get("data", ["text"])) for output in cell.get("outputs", [])] for cell in notebook.cells]
    assert kinds == [
        [sorted(output.get("data", ["text"])) for output in cell.get("outputs", [])] for cell in committed["cells"]
    ]
