"""Modules that commands use to plan and prepare must not import the large libraries of training."""

import json
import subprocess
import sys
from pathlib import Path

from tests.synthesis import folder_corpus, hiss

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
