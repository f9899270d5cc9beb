"""Makes a folder of wheels from which NeMo 3.0.0 runs on a machine without a network.

    python -m benchmarks.nemo_wheels -o FOLDER [--python 3.12]

The machine has torch and what comes with it, pytorch-lightning, transformers, einops, sentencepiece, scikit-learn,
pandas, pyarrow, onnx, numba and tensorboard; the folder has the rest of what NeMo imports for NEST. Versions are those
that were tried together. `python -m benchmarks.gpu --nemo-wheels FOLDER` installs them beside the machine's packages.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness.children import run_peer

WHEELS = """
nemo-toolkit==3.0.0 lhotse==1.33.0 lightning==2.4.0 cytoolz==1.2.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
xxhash==4.1.0 hydra-core==1.3.2 omegaconf==2.3.0 soundfile==0.14.0 cffi==2.1.1 pycparser==3.12 librosa soxr==1.1.0
audioread==3.1.0 decorator==5.3.1 pooch==1.9.0 platformdirs==4.14.8 kaldialign==0.12.0 webdataset==1.0.2
braceexpand==0.1.7 intervaltree==3.2.1 sortedcontainers==2.4.0 lilcom==1.8.2 text-unidecode==1.3 smart-open==9.0.2
whisper-normalizer==0.1.15 nv-one-logger-core==2.3.1 nv-one-logger-training-telemetry==2.3.1
nv-one-logger-pytorch-lightning-integration==2.3.1 strenum==0.4.15 overrides==7.7.0 toml==0.10.2 pydantic==2.14.4
pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5
""".split()
"""Requirements that exist as wheels. librosa depends on the version of Python."""

SOURCES = ["antlr4-python3-runtime==4.9.3"]
"""Requirements that are built here, because they exist as source only; pure Python."""

PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]


def main() -> int:
    """Downloads and builds the wheels, and prints their number and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder, which must not exist")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine that gets the folder")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True)
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", arguments.python]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    _pip("download", *target, "-d", str(arguments.output), *WHEELS)
    _pip("wheel", "-w", str(arguments.output), *SOURCES)
    sizes = sorted((path.stat().st_size, path.name) for path in arguments.output.glob("*.whl"))
    for size, name in sizes:
        print(f"{size / 1e6:5.1f} MB  {name}")
    print(f"{sum(size for size, _ in sizes) / 1e6:5.1f} MB  in {len(sizes)} wheels for Python {arguments.python}")
    return 0


def _pip(command: str, *arguments: str) -> None:
    run_peer([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], echo=True)


if __name__ == "__main__":
    sys.exit(main())
