"""`prepare` with trusted durations starts fast and takes little memory."""

import json
import subprocess
import sys
from pathlib import Path

from tests.synthesis import write_jsonl

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
