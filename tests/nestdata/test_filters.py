"""The import of torchaudio beside a torch of another CUDA version; other tests check what the filters compute."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
import torch
torch.version.cuda = "99.1"
if sys.argv[1] == "of nestdata":
    import nestdata.filters
import torchaudio
assert torch.version.cuda == "99.1"
print(torchaudio.transforms.Resample(8000, 16000)(torch.ones(100)).shape)
"""


def run(order: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torchaudio that was built for CUDA")
def test_torchaudio_is_imported_beside_a_torch_of_another_cuda_version_without_changing_torch() -> None:
    assert "different CUDA versions" in run("first").stderr
    done = run("of nestdata")
    assert (done.returncode, done.stdout) == (0, "torch.Size([200])\n"), done.stderr
