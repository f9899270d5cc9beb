"""What importing and the light commands must not import, and torchaudio beside a torch of another CUDA version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nestdata
import nestmodel
from tests.synthesis import folder_corpus, hiss, write_jsonl


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


REFUSE_LARGE_LIBRARIES = """
import sys
for name in ("torch", "torchaudio", "lhotse", "soundfile", "audiomentations", "matplotlib", "nestguard"):
    sys.modules[name] = None  # an import raises ImportError
"""


def test_modules_are_imported_without_large_libraries_and_without_the_stall_guard() -> None:
    modules = ("audio.decode", "corpus.corpora", "pack.pack_corpora", "pack.verify", "plan.batch_plan", "plan.summary")
    program = REFUSE_LARGE_LIBRARIES + "import " + ", ".join(f"nestdata.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_plan_command_runs_without_large_libraries(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000 + i, i) for i in range(8)})
    program = """
import sys
from nestcli.nestdata import main
code = main(["plan", *sys.argv[1:]])
sys.exit(code or " ".join({"torch", "lhotse", "soundfile", "audiomentations", "matplotlib"} & {*sys.modules}) or 0)
"""
    command = [sys.executable, "-c", program, str(corpus.path), "--world-size", "2", "--json"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    assert json.loads(printed)["num_positions"] == 8


# Prepares the first argument into the second, and prints the modules that were imported and the peak memory in MB.
PREPARE = """
import json, sys
from pathlib import Path
from nestdata import PrepareConfig, prepare_corpus
report = prepare_corpus([sys.argv[1]], sys.argv[2], PrepareConfig(probe="missing", report_samples=0))
# Not `ru_maxrss` of getrusage, which includes the memory of the parent process before exec.
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "VmHWM:"]
peak_mb = int(peak) * 1024 / 1e6
print(json.dumps({"num_cuts": report.num_cuts, "modules": sorted(sys.modules), "peak_mb": peak_mb}))
"""
HEAVY = {
    "datasets",
    "lhotse",
    "matplotlib",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "soundfile",
    "torch",
    "torchaudio",
}


def test_trusted_durations_are_prepared_without_heavy_packages_in_150_mb(tmp_path: Path) -> None:
    rows = [
        {"audio_filepath": f"wavs/{i:06d}.flac", "duration": 1 + i % 1000 / 100, "text": "some words", "lang": "en"}
        for i in range(20_000)
    ]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    command = [sys.executable, "-c", PREPARE, str(manifest), str(tmp_path / "speech.corpus")]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert result["num_cuts"] == 20_000
    assert HEAVY & {module.split(".")[0] for module in result["modules"]} == set()
    assert result["peak_mb"] < 150


OTHER_CUDA = """
import sys
import torch
torch.version.cuda = "99.1"
if sys.argv[1] == "of nestdata":
    import nestdata.filters
import torchaudio
assert torch.version.cuda == "99.1"
print(torchaudio.transforms.Resample(8000, 16000)(torch.ones(100)).shape)
"""


def run_beside_another_cuda(order: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", OTHER_CUDA, order], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torchaudio that was built for CUDA")
def test_torchaudio_is_imported_beside_a_torch_of_another_cuda_version_without_changing_torch() -> None:
    assert "different CUDA versions" in run_beside_another_cuda("first").stderr
    done = run_beside_another_cuda("of nestdata")
    assert (done.returncode, done.stdout) == (0, "torch.Size([200])\n"), done.stderr
