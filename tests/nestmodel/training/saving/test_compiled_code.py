import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestmodel import NestModel
from nestmodel.nn.backend import Backend
from nestmodel.training.saving.compiled_code import CompiledCode, read_trusted, write_trusted
from tests.training import tiny_config, trainer

START = """
import json, sys, warnings
from pathlib import Path
from types import SimpleNamespace
import torch
from torch._dynamo.utils import counters
from nestmodel import NestModel
from nestmodel.nn.backend import Backend
from nestmodel.training.saving.compiled_code import CompiledCode
from tests.training import tiny_config

model = NestModel(tiny_config())
model.use_backend(Backend(kernels=True, compiled=True))
strategy = SimpleNamespace(root_device=torch.device("cpu"))
trainer = SimpleNamespace(strategy=strategy, node_rank=0, fast_dev_run=False, accumulate_grad_batches=1)
code = CompiledCode(Path(sys.argv[1]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    code.on_train_start(trainer, model)
    x = torch.eye(2, requires_grad=True)
    torch.compile(lambda x: (x @ x).mm(x))(x).sum().backward()  # products only: nothing for a C++ compiler
    code.on_train_batch_end(trainer, model, None, None, 0)
ours = [str(each.message) for each in caught if sys.argv[1] in str(each.message)]
hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
print(json.dumps([hits, misses, x.grad.tolist(), ours]))
"""


def start(folder: Path, cache: Path) -> tuple[int, int, list[str]]:
    """Compiles in a new process with an empty cache; returns hits, misses, and warnings about the folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    hits, misses, gradient, warned = json.loads(done.stdout.splitlines()[-1])
    assert gradient == [[3.0, 3.0], [3.0, 3.0]]
    return hits, misses, warned


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_start_with_an_empty_cache_takes_the_code_of_the_start_before(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    hits, misses, warned = start(folder, tmp_path / "machine 0")
    assert (hits, warned) == (0, [])
    assert misses > 0
    assert start(folder, tmp_path / "machine 1") == (misses, 0, [])
    file = folder / "0.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    hits, again, (warning,) = start(folder, tmp_path / "machine 2")
    assert (hits, again) == (0, misses)
    assert "is damaged" in warning
    assert read_trusted(file) is not None  # it was written again


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_folder_that_cannot_be_used_costs_time_only(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    folder.write_text("a file in its place")
    hits, misses, warned = start(folder, tmp_path / "machine")
    assert hits == 0
    assert misses > 0
    assert ["is not used" in warned[0], "cannot be written" in warned[1]] == [True, True]


def test_a_file_of_another_release_of_torch_is_passed_over(tmp_path: Path) -> None:
    model = NestModel(tiny_config())
    model.use_backend(Backend(kernels=True, compiled=True))
    write_trusted(tmp_path / "0.bin", b"of another release of torch")
    CompiledCode(tmp_path).on_train_start(trainer(tmp_path), model)


def test_a_file_that_is_damaged_or_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compiled" / "0.bin"
    assert read_trusted(path) is None
    write_trusted(path, b"code")
    assert read_trusted(path) == b"code"
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ValueError, match="other users"):
            read_trusted(path)
    path.chmod(0o600)
    for content in (b"", path.read_bytes()[:-1], path.read_bytes() + b"\0"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            read_trusted(path)
    write_trusted(path, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="other users"):
        read_trusted(path)
