"""`python -m benchmarks.gpu` on a CPU, with a tiny model."""

import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.__main__ import Part, run_beside
from benchmarks.gpu.check import check_backends, compare_errors
from benchmarks.gpu.results import Results
from benchmarks.gpu.trial import BACKENDS
from nestguard.observe.process import process_state, start_ticks
from nestmodel import NestModel, NestNetwork
from nestmodel.nn.backend import Backend
from tests.nestguard.runs import PATIENCE_S, wait_until

CPU = torch.device("cpu")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """An empty folder of results."""
    return Results(tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_call_measures_what_an_earlier_one_has_not(tmp_path: Path) -> None:
    options = ["--device", "cpu", "-o", str(tmp_path), "--limit", "600", "--parts", "steps"]
    options += ["--presets", "small", "--backends", "kernels", "torch"]
    results = Results(tmp_path)
    earlier = {"ms": 1.0, "spread": 0.0, "audio_s_per_s": 1.0, "share_of_peak": None, "busy_ms": 1.0, "host_ms": 1.0}
    earlier |= {"launches": 0, "first_s": 1.0, "reserved_gb": 0.0}
    results.put(part="steps", preset="small", cuts=2, backend="kernels", **earlier)
    assert program.main(options) == 0
    after = results.rows()
    steps = {row["backend"]: row for row in after if row.get("part") == "steps"}
    assert steps.keys() == {"kernels", "torch"}
    assert steps["kernels"]["ms"] == 1.0
    assert steps["torch"]["tflop"] > 0
    assert steps["torch"]["ms"] > 1.0
    assert steps["torch"]["busy_ms"] > 0
    assert [row["code"] for row in after if "ended" in row] == [0]
    assert (tmp_path / "results.md").stat().st_size
    assert "== small, 2 cuts, torch" in (tmp_path / "kernels.txt").read_text()
    assert program.main(options) == 0
    assert results.rows() == after


@pytest.mark.slow
def test_backends_are_right_unless_they_differ_from_float32_by_more_than_bf16_does(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use_wrong_backend(model: NestModel, backend: Backend) -> None:
        NestNetwork.use_backend(model, backend)
        if backend == BACKENDS["kernels"]:
            with torch.no_grad():
                model.encoder.layers[1].norm_out.weight.mul_(1.2)

    check_backends(results, CPU, "small", ["kernels", "torch"])
    right = results.rows()
    assert [(row["backend"], row["is_right"]) for row in right] == [("kernels", True), ("torch", True)]
    assert 0 < right[0]["share_of_limit"] == pytest.approx(right[1]["share_of_limit"])
    check_backends(results, CPU, "small", ["kernels", "torch"])
    assert results.rows() == right
    monkeypatch.setattr(NestModel, "use_backend", use_wrong_backend)
    check_backends(results, CPU, "medium", ["kernels"])
    assert results.rows()[-1]["is_right"] is False


def test_a_missing_or_non_finite_gradient_is_wrong() -> None:
    exact = {"loss": torch.tensor(2.0), "a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-6])}
    plain = dict.fromkeys(exact, 0.01)
    limit = 0.02 + 4 / 128
    near = compare_errors({**exact, "a": exact["a"] * (1 + limit / 2)}, exact, plain)
    assert (near["is_right"], near["worst"]) == (True, "a")
    assert near["share_of_limit"] == pytest.approx(0.5, rel=1e-4)  # float32
    # Its norm is below a hundredth of that of all gradients, 0.05.
    assert compare_errors({**exact, "b": torch.tensor([0.05 * limit / 2])}, exact, plain)["is_right"] is True
    for found in ({"loss": exact["loss"], "a": exact["a"]}, {**exact, "b": torch.tensor([math.nan])}):
        wrong = compare_errors(found, exact, plain)
        assert (wrong["is_right"], wrong["worst"]) == (False, "b")


@pytest.mark.multiprocess
def test_a_part_that_hangs_ends_at_its_limit_with_all_its_processes(tmp_path: Path) -> None:
    hang = "import subprocess, sys; p = subprocess.Popen(['sleep', '900']); print(p.pid, flush=True); p.wait()"
    parts = [Part("hangs", 2.0, ["-c", hang]), Part("fails", 60.0, ["-c", "raise SystemExit(3)"])]
    results = Results(tmp_path)
    run_beside(results, parts, time.monotonic() + 60, str(tmp_path))
    assert [(row["ended"], row["code"]) for row in results.rows()] == [("hangs", "limit"), ("fails", 3)]
    for child in (tmp_path / "log-hangs.txt").read_text().split():  # none if the machine is too slow to start it
        wait_until(lambda pid=int(child): process_state(pid, start_ticks(pid) or 0).has_ended, PATIENCE_S)
    run_beside(results, parts, time.monotonic() + 1, str(tmp_path))  # too little time to begin
    assert len(results.rows()) == 2
