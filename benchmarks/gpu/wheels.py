"""Fetches the wheels with which `python -m benchmarks.gpu` runs on a machine without a network.

    python -m benchmarks.gpu.wheels [--python 3.12]

That machine has torch, pytorch-lightning, jaxtyping, pytest, transformers, pandas, onnx and their dependencies. The
other packages get into folders which git ignores: `.gpu/wheels` for this project and its tests, `.gpu/wheels-nemo` for
NeMo 3.0.0 with NEST. Needs pip and a network; 26 MB.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness.children import run_peer
from benchmarks.harness.repository import REPOSITORY

FOLDER = REPOSITORY / ".gpu"
OURS, NEMO = FOLDER / "wheels", FOLDER / "wheels-nemo"

OUR_WHEELS = """
audiomentations audioread beartype cffi cytoolz decorator docstring-parser intervaltree lhotse librosa
lilcom==1.8.2 miniaudio numpy-minmax numpy-rms orjson platformdirs pooch pycparser pyte python-stretch soundfile soxr
typeguard tyro wcwidth
""".split()
"""Packages with the versions of constraints.txt, if it lists them."""

NEMO_WHEELS = """
nemo-toolkit==3.0.0 lhotse==1.33.0 lightning==2.4.0 cytoolz==1.2.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
xxhash==4.1.0 hydra-core==1.3.2 omegaconf==2.3.0 soundfile==0.14.0 cffi==2.1.1 pycparser==3.12 librosa soxr==1.1.0
audioread==3.1.0 decorator==5.3.1 pooch==1.9.0 platformdirs==4.14.8 kaldialign==0.12.0 webdataset==1.0.2
braceexpand==0.1.7 intervaltree==3.2.1 sortedcontainers==2.4.0 lilcom==1.8.2 text-unidecode==1.3 smart-open==9.0.2
whisper-normalizer==0.1.15 nv-one-logger-core==2.3.1 nv-one-logger-training-telemetry==2.3.1
nv-one-logger-pytorch-lightning-integration==2.3.1 strenum==0.4.15 overrides==7.7.0 toml==0.10.2 pydantic==2.14.4
pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5
""".split()
"""Versions that were tried together. librosa depends on the version of Python."""

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")


def main() -> int:
    """Downloads and builds the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU [%(default)s]")
    arguments = parser.parse_args()
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", arguments.python]
    target += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    pins = ["--constraint", str(REPOSITORY / "constraints.txt")]
    _pip("download", *target, *pins, "-d", str(OURS), *OUR_WHEELS)
    _pip("download", *target, "-d", str(NEMO), *NEMO_WHEELS)
    _pip("wheel", "-w", str(NEMO), "antlr4-python3-runtime==4.9.3")  # exists as source only; pure Python
    return 0


def install_wheels(wheels: Path, target: str) -> None:
    """Installs all wheels of a folder into another folder, without their dependencies and without a network.

    Raises:
        SystemExit: The wheels are not for this version of Python or this machine.
    """
    _pip("install", "--no-index", "--no-compile", "--target", target, *map(str, sorted(wheels.glob("*.whl"))))


def _pip(command: str, *arguments: str) -> None:
    run_peer([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], echo=True)


if __name__ == "__main__":
    sys.exit(main())
