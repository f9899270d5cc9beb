"""`python -m benchmarks.gpu` on a CPU: every section runs with a tiny model."""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.context import Context, tiny_extent
from benchmarks.gpu.device import peak_tflops
from benchmarks.gpu.energy import counter_of
from benchmarks.gpu.forms import Case, fitting
from benchmarks.gpu.measuring import Kernel
from benchmarks.gpu.report import Report, Row, Section
from nestguard import EXIT_STALLED
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[1]
IN_PROCESS = [name for name in program.SECTIONS if name != "stalls"]
OTHER_FORMS = ("torch's subsampling", "checkpointed")


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
    return program.main(["--device", "cpu", "-o", str(tmp_path / "results.md"), *options]), stored(tmp_path)


def stored(tmp_path: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((tmp_path / "results.json").read_text())
    return {section["name"]: section for section in report["sections"]}


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
    for parity in (sections["parity"]["rows"][0], sections["best"]["rows"][0]):
        assert parity["row"].endswith("float32")
        # Some hundred roundings of 6e-8; a wrong operation changes the first digits.
        assert max(parity["encoder"], parity["loss"], parity["gradients"]) < 1e-4
    golden = rows(sections["golden"])["float32"]
    assert golden["tokens that differ"] == 0
    assert max(golden["encoder"], golden["log-probabilities"]) < 1e-5  # as in tests/golden
    assert set(rows(sections["ceilings"])) == {
        "copy, TB/s read and written",
        "product in bf16, TFLOP/s",
        "x + 1 in a loop, us on the host",
    }
    (step,) = sections["steps"]["rows"]
    assert step["row"] == "tiny, 2 x 2 s, eager"
    assert step["step, ms"] > step["host, ms"] > 0
    assert step["busy, ms"] > 0
    assert step["operations"] > 100
    assert step["TFLOP"] > 0
    *kernels, total = sections["kernels"]["rows"]
    assert total["ms"] >= sum(row["ms"] for row in kernels) > 0
    assert {"product", "convolution", "copy"} <= {row["group"] for row in kernels}
    other, checkpointed = (rows(sections["forms"])[f"tiny, 2 x 2 s, {form}"] for form in OTHER_FORMS)
    assert checkpointed["operations"] > other["operations"]
    assert all(row["gain"] > 0 for row in (other, checkpointed))
    assert len(sections["parts"]["rows"]) == 10
    assert all(row["host, ms"] > 0 and row["decides"] for row in sections["parts"]["rows"])
    form = OTHER_FORMS[0] if other["gain"] > 1.02 else "eager"
    assert set(rows(sections["budgets"])) == {f"tiny, {number} x 2 s, {form}" for number in (2, 4)}
    assert set(rows(sections["presets"])) == {f"tiny, 2 x 2 s, {form}"}
    assert set(rows(sections["best"])) == {f"tiny, {form}, {precision}" for precision in ("float32", "bf16")}
    assert "give --nemo-wheels" in sections["nemo"]["notes"][0]
    assert {"tiny, FLAC", "tiny, PCM"} == set(rows(sections["feeding"]))
    assert all(row["feed ratio"] > 0 for row in sections["feeding"]["rows"])
    assert rows(sections["waits"])["waits a step"]["value"] >= 1
    assert all(row["price"] > 0 for row in sections["deterministic"]["rows"])
    assert set(rows(sections["resume"])) == {"default", "deterministic"}
    for row in sections["resume"]["rows"]:
        assert row["equal runs have equal bits"]
        assert row["a resumed run has equal bits"]
    text = (tmp_path / "results.md").read_text()
    assert all(f"## {name}\n\nDecides: {program.SECTIONS[name].decides}" in text for name in IN_PROCESS)


KILLED = """
import os
import signal
import sys

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.report import Report

write = Report.write


def write_and_die(self, path):
    write(self, path)
    if "parts" in self.sections and len(self.sections["parts"].rows) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


Report.write = write_and_die
program.main(sys.argv[1:])
"""


@pytest.mark.faults
@pytest.mark.multiprocess
def test_a_start_after_one_that_was_killed_keeps_its_rows_and_measures_the_others(tmp_path: Path) -> None:
    options = ["--only", "ceilings", "parts", "device"]
    command = [sys.executable, "-c", KILLED, "--device", "cpu", "-o", str(tmp_path / "results.md"), *options]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    before = stored(tmp_path)
    assert {name: len(section["rows"]) for name, section in before.items()} == {"ceilings": 3, "parts": 3}
    code, after = run(tmp_path, *options)
    assert code == 0
    assert after["ceilings"] == before["ceilings"]
    assert after["parts"]["rows"][:3] == before["parts"]["rows"]
    assert len(rows(after["parts"])) == len(after["parts"]["rows"]) == 10
    assert after["device"]["rows"]
    assert all(section["is_complete"] for section in after.values())
    assert run(tmp_path, *options) == (0, after)
    _, fresh = run(tmp_path, *options, "--fresh")
    assert fresh["parts"]["rows"][:3] != before["parts"]["rows"]  # times differ in some of 17 digits


def test_rows_of_another_device_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "--only", "device")
    found = program.identity
    monkeypatch.setattr(program, "identity", lambda context: {**found(context), "device": "NVIDIA H100"})
    with pytest.raises(SystemExit, match="with other values of: device"):
        run(tmp_path, "--only", "device")
    assert run(tmp_path, "--only", "device", "--fresh")[0] == 0


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_context: object, section: Section) -> None:
        if not section.has("first"):
            section.add({"row": "first", "value": 1})
            raise ValueError("no such kernel")
        section.add({"row": "second", "value": 2})

    monkeypatch.setitem(program.SECTIONS, "parity", program.Plan(fail, 1, "nothing"))
    code, sections = run(tmp_path, "--only", "parity", "device")
    assert code == 1
    assert sections["parity"]["error"] == "ValueError: no such kernel"
    assert rows(sections["parity"])["first"]["value"] == 1
    assert sections["device"]["error"] is None
    assert sections["device"]["rows"]
    code, sections = run(tmp_path, "--only", "parity", "device")  # which tries again
    assert code == 0
    assert sections["parity"]["error"] is None
    assert [row["value"] for row in sections["parity"]["rows"]] == [1, 2]


def test_a_section_without_time_says_what_was_not_measured(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--only", "steps", "--minutes", "0")
    assert code == 0
    assert sections["steps"]["rows"] == []
    assert "`tiny, 2 x 2 s, eager` and later rows were not measured" in sections["steps"]["notes"][0]
    assert not sections["steps"]["is_complete"]


def test_a_case_that_does_not_fit_is_halved_until_it_does(tmp_path: Path) -> None:
    def measure(_context: Context, case: Case) -> Row:
        if case.shape[0] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return {"row": case.row, "result": "measured"}

    context = Context(torch.device("cpu"), tiny_extent(), tmp_path)
    rows = fitting(context, Case("tiny", (8, 32000)), measure)
    assert [row["row"] for row in rows] == [f"tiny, {number} x 2 s, eager" for number in (8, 4, 2)]
    assert [row["result"] for row in rows] == ["out of memory", "out of memory", "measured"]
    with pytest.raises(ZeroDivisionError):
        fitting(context, Case("tiny", (8, 32000)), lambda _context, _case: {"row": 1 // 0})


STAND_IN = {
    "omegaconf.py": "class OmegaConf:\n    create = staticmethod(lambda config: config)\n",
    "nemo/utils/__init__.py": "import logging\n\nlogging.setLevel = lambda level: None\n",
    "nemo/collections/asr/models/__init__.py": """
import torch

print("NeMo prints what it likes")


class EncDecDenoiseMaskedTokenPredModel(torch.nn.Linear):
    def __init__(self, config):
        if "use_pytorch_sdpa" in config["encoder"]:
            raise ValueError("no such kernel")
        super().__init__(1, config["num_classes"])

    def forward(self, input_signal, input_signal_length, noisy_input_signal, noisy_input_signal_length, apply_mask):
        assert input_signal.shape == (2, 32000) and input_signal_length.tolist() == [32000, 32000]
        assert apply_mask and not torch.equal(input_signal, noisy_input_signal)
        scores = super().forward(noisy_input_signal.mean(1, keepdim=True))
        return scores, input_signal_length, None, torch.zeros(2, dtype=torch.int64)

    def loss(self, masks, decoder_outputs, targets, decoder_lengths):
        return torch.nn.functional.cross_entropy(decoder_outputs, targets)
""",
}
"""Files of a package with the names of NeMo that are used. Its fused attention does not work."""


@pytest.mark.faults
@pytest.mark.multiprocess
def test_another_package_takes_turns_in_a_process_of_its_own(tmp_path: Path) -> None:
    about = "nemo_toolkit-3.0.0.dist-info"
    with zipfile.ZipFile(tmp_path / "nemo_toolkit-3.0.0-py3-none-any.whl", "w") as wheel:
        for name, content in STAND_IN.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: nemo_toolkit\nVersion: 3.0.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    code, sections = run(tmp_path, "--only", "nemo")
    assert (code, sections["nemo"]["is_complete"]) == (0, False)
    code, sections = run(tmp_path, "--only", "nemo", "--nemo-wheels", str(tmp_path))
    (row,) = sections["nemo"]["rows"]
    assert row["row"] == "tiny, 2 x 2 s, NeMo with default attention"
    assert row["NeMo / ours"] == pytest.approx(row["NeMo, ms"] / row["ours, ms"])
    assert row["NeMo, ms"] > row["host of NeMo, ms"] > 0
    assert 0 < row["loss of NeMo"] < 10
    assert code == 1
    assert "NeMo's process ended with exit code 1: ValueError: no such kernel" in sections["nemo"]["error"]


class Nvml:
    """Counts 1.5 J at each call."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.millijoules = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, _handle: object) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: object, millijoules: Any) -> int:
        self.millijoules += 1500
        ctypes.cast(millijoules, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return self.code


def test_energy_is_read_in_joules_or_not_at_all() -> None:
    counter = counter_of(Nvml(), "GPU-1")
    assert counter is not None
    assert (counter(), counter()) == (3.0, 4.5)
    assert counter_of(Nvml(), "GPU-2") is None
    assert counter_of(Nvml(code=3), "GPU-1") is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("triton_poi_fused_add_mul_0", "triton"),
        ("gradient_kernel", "triton"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>)", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopB_TNN", "product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "product"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_backward_kernel<3, 2, float>", "convolution"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "norm"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>",
            "optimizer, foreach",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "sum"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("void cunn_SoftMaxForward<8, float>", "softmax"),
        ("void somebody::kernel()", "other"),
        ("aten::addmm", "product"),
        ("aten::_to_copy", "copy"),
    ],
)
def test_kernels_are_grouped_by_their_names(name: str, group: str) -> None:
    assert Kernel(name, 1, 1.0).group == group


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
    text = Report("command", sections={"s": section}).markdown()
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
from benchmarks.gpu.report import Section

dist.init_process_group("gloo")
context = Context(torch.device("cpu"), tiny_extent(), Path(sys.argv[1]), rank=dist.get_rank(), world_size=2)

def fail_in_second_case(context, section):
    for case in range(3):
        if not context.has_time():
            return
        if case == context.rank == 1:
            raise ValueError("an error")

sections = [Section("a"), Section("b")]
for section, run in zip(sections, (fail_in_second_case, lambda context, section: context.has_time())):
    _run(context, section, run)
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
