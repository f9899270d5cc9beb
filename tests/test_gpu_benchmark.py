"""`python -m benchmarks.gpu` on a CPU: every section runs with a tiny model."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.presets import peak_tflops
from benchmarks.gpu.report import Report, Section
from nestguard import EXIT_STALLED
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[1]
IN_PROCESS = [name for name in program.SECTIONS if name != "stalls"]


pytestmark = pytest.mark.usefixtures("restored_determinism")


@pytest.fixture(autouse=True)
def restored_log_levels() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the program; returns its exit code, and the sections of the JSON file by name."""
    code = program.main(["--device", "cpu", "-o", str(tmp_path / "results.md"), *options])
    report = json.loads((tmp_path / "results.json").read_text())
    return code, {section["name"]: section for section in report["sections"]}


def rows(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in section["rows"]}


@pytest.mark.slow
def test_every_section_that_needs_no_other_process_runs_on_a_cpu(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--only", *IN_PROCESS)
    assert {name: section["error"] for name, section in sections.items()} == dict.fromkeys(IN_PROCESS)
    assert code == 0
    facts = rows(sections["device"])
    assert facts["torch"]["value"] == torch.__version__
    assert facts["NCCL_ALGO"]["value"] == "Ring"
    parity = rows(sections["parity"])["tiny, float32"]
    # Some hundred roundings of 6e-8; a wrong operation changes the first digits.
    assert max(parity["encoder"], parity["loss"], parity["gradients"]) < 1e-4
    golden = rows(sections["golden"])["float32"]
    assert golden["tokens that differ"] == 0
    assert max(golden["encoder"], golden["log-probabilities"]) < 1e-5  # as in tests/golden
    eager, checkpointed = (rows(sections["presets"])[f"tiny, 2 x 2 s, {mode}"] for mode in ("eager", "checkpointed"))
    assert eager["step, ms"] > 0
    assert checkpointed["operations"] > eager["operations"] > 100
    assert checkpointed["TFLOP"] > eager["TFLOP"] > 0
    assert {"tiny, FLAC", "tiny, PCM"} == set(rows(sections["feeding"]))
    assert all(row["feed ratio"] > 0 for row in sections["feeding"]["rows"])
    assert rows(sections["waits"])["waits a step"]["value"] >= 1
    assert all(row["price"] > 0 for row in sections["deterministic"]["rows"])
    assert set(rows(sections["resume"])) == {"default", "deterministic"}
    for row in sections["resume"]["rows"]:
        assert row["equal runs have equal bits"]
        assert row["a resumed run has equal bits"]
    text = (tmp_path / "results.md").read_text()
    assert all(f"## {name}\n" in text for name in IN_PROCESS)


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_context: object, section: Section) -> None:
        section.rows.append({"row": "first", "value": 1})
        raise ValueError("no such kernel")

    monkeypatch.setitem(program.SECTIONS, "parity", (fail, 0.1))
    code, sections = run(tmp_path, "--only", "parity", "device")
    assert code == 1
    assert sections["parity"]["error"] == "ValueError: no such kernel"
    assert rows(sections["parity"])["first"]["value"] == 1
    assert sections["device"]["error"] is None
    assert sections["device"]["rows"]


def test_a_section_without_time_says_what_was_not_measured(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--only", "presets", "--minutes", "0")
    assert code == 0
    assert sections["presets"]["rows"] == []
    assert "`tiny, 2 x 2 s, eager` and later cases were not measured" in sections["presets"]["notes"][-1]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("a GPU of tomorrow", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_table_has_the_columns_of_all_rows() -> None:
    section = Section("s", rows=[{"row": "a|b", "x": 0.123456}, {"row": "c", "y": True}])
    text = Report("command", [section]).markdown()
    assert "| row | x | y |\n|---|---|---|\n| a\\|b | 0.1235 |  |\n| c |  | yes |\n" in text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_equal_and_resumed_runs_have_equal_bits_on_a_gpu_in_deterministic_mode(tmp_path: Path) -> None:
    # A process of its own: cuBLAS reads its environment variable once.
    command = [sys.executable, "-m", "benchmarks.gpu", "-o", str(tmp_path / "results.md"), "--only", "resume"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=600)
    sections = json.loads((tmp_path / "results.json").read_text())["sections"]
    row = rows(sections[0])["deterministic"]
    assert row["equal runs have equal bits"]
    assert row["a resumed run has equal bits"]


@pytest.mark.faults
@pytest.mark.multiprocess
@pytest.mark.slow
def test_stalls_of_a_kernel_and_of_a_collective_are_reported_by_the_guard(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--only", "stalls")
    assert code == 0
    found = rows(sections["stalls"])
    kernel, collective = found["kernel, 1 rank, cpu"], found["collective, 2 ranks, cpu"]
    assert (kernel["exit code"], kernel["culprit"], kernel["phase"]) == (EXIT_STALLED, "rank-0", "FORWARD")
    assert (collective["exit code"], collective["culprit"]) == (EXIT_STALLED, "rank-1")


@pytest.mark.faults
@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_ranks_under_torchrun_write_one_report(tmp_path: Path) -> None:
    output = tmp_path / "results.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "localhost", "--master-port", str(free_port())]
    command += ["-m", "benchmarks.gpu", "--device", "cpu", "-o", str(output), "--only", *IN_PROCESS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sections = {section["name"]: section for section in json.loads(output.with_suffix(".json").read_text())["sections"]}
    assert {name: section["error"] for name, section in sections.items()} == dict.fromkeys(IN_PROCESS)
    assert rows(sections["device"])["ranks"]["value"] == 2
    assert rows(sections["waits"])["waits a step"]["microbatches a rank"] == 1
    assert rows(sections["resume"])["deterministic"]["a resumed run has equal bits"]


ONE_RANK_FAILS = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.gpu.__main__ import _run
from benchmarks.gpu.context import Context, tiny_extent

dist.init_process_group("gloo")
context = Context(torch.device("cpu"), tiny_extent(), Path(sys.argv[1]), rank=dist.get_rank(), world_size=2)

def fail_in_second_case(context, section):
    for case in range(3):
        if not context.has_time():
            return
        if case == context.rank == 1:
            raise ValueError("an error")

sections = [_run(context, "a", fail_in_second_case), _run(context, "b", lambda context, section: context.has_time())]
assert [section.error for section in sections] == ["rank 1: ValueError: an error", None], sections
# Otherwise, a thread of Gloo that still runs at the exit of the interpreter can abort the process.
dist.destroy_process_group()
"""


@pytest.mark.faults
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_section_that_fails_on_one_rank_ends_on_all_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_RANK_FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "localhost", "--master-port", str(free_port()), str(tmp_path / "script.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
