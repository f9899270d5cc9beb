"""Installs a wheel without extras into a new environment and runs its commands in an empty directory.

    python tests/wheel_smoke.py dist/NAME.whl [PACKAGES]

PACKAGES is a folder of installed packages, such as .venv/lib/python3.11/site-packages, to which the new environment
refers instead of downloading what the wheel needs.

Uses the standard library only, because it runs outside of the project's environment.
"""

import math
import os
import struct
import subprocess
import sys
import tempfile
import venv
import wave
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SETTINGS = """\
output: run
trainer: {max_steps: 2, accelerator: cpu}
data: {plan: {max_batch_seconds: 4.0, microbatches_per_step: 1}, num_workers: 0}
model:
  config:
    quantizer: {num_classes: 32}
    masking: {prob: 0.05}
    encoder: {d_model: 16, num_heads: 2, num_layers: 1, subsampling_channels: 8}
"""


def write_sweep(path: Path, seconds: float, low_hz: float) -> None:
    """Writes 16-bit mono audio whose pitch rises by an octave a second."""
    values = (math.sin(2 * math.pi * low_hz * 2 ** (i / 16000) * i / 16000) for i in range(round(16000 * seconds)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(b"".join(struct.pack("<h", round(10_000 * value)) for value in values))


def main(wheel: Path, packages: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        binaries, directory = Path(name, "venv", "bin"), Path(name, "empty")
        venv.create(binaries.parent, with_pip=True)
        directory.mkdir()
        # PYTHONPATH may contain the working tree, which would hide that a file is missing from the wheel.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(command: str, *arguments: str | Path, fails: bool = False) -> subprocess.CompletedProcess[str]:
            print("$", command, *arguments, flush=True)
            words = [str(binaries / command), *map(str, arguments)]
            done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
            if (done.returncode != 0) != fails:
                sys.exit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
            return done

        needed = ["--constraint", REPOSITORY / "constraints.txt"] if packages is None else ["--no-deps"]
        run("python", "-m", "pip", "install", "--quiet", *needed, wheel)
        if packages is not None:
            (own,) = binaries.parent.glob("lib/python*/site-packages")
            (own / "packages.pth").write_text(f"{packages.resolve()}\n")
        print(run("python", "-c", "import nestdata, nestmodel; print(nestdata.__file__, nestmodel.__file__)").stdout)
        Path(directory, "audio").mkdir()
        for i in range(8):
            write_sweep(Path(directory, "audio", f"{i}.wav"), 1.0 + i / 8, 100.0 + 20 * i)
        Path(directory, "tiny.yaml").write_text(SETTINGS)
        run("nestdata", "prepare", "audio", "-o", "speech.corpus")
        run("nestdata", "sample-batch", "preview", "speech.corpus", "--max-batch-seconds", "4", "-o", "preview")
        run("nestmodel", "fit", "speech.corpus", "--config", "tiny.yaml")
        (checkpoint,) = Path(directory, "run").rglob("step_*.ckpt")
        run("nestmodel", "features", checkpoint, "audio", "-o", "features")
        for path in ("speech.corpus/report.html", "preview/index.html", "features"):
            if not Path(directory, path).exists():
                sys.exit(f"{path} is missing")
        if len(list(Path(directory, "features").rglob("*.npy"))) != 8:
            sys.exit("features: eight .npy files were expected")
        if packages is not None:
            return  # the extras are among them
        without_extra = run("nestmodel", "export", checkpoint, "--to", "onnx", fails=True)
        (line,) = without_extra.stderr.splitlines()
        if not line.startswith("error: ") or "pip install 'nest-pretrain[export]'" not in line:
            sys.exit(f"the missing extra is not named: {line}")
        print(line)


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
