"""Executes the notebook in examples/ in a real kernel, and checks what is committed of it."""

import json
import re
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


def test_the_committed_notebook_was_executed_and_names_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    without_pictures = re.sub(r"[A-Za-z0-9+/=]{1000,}", "", text)
    assert not re.search(r'["\s(](/home|/root|/work|/tmp|/Users)/', without_pictures)
