"""Downloads LibriSpeech from OpenSLR, checks each archive against its SHA-256, and unpacks it.

    python recipes/librispeech/download.py data

DIRECTORY receives the archives (60 GB) and the folder LibriSpeech (60 GB). Lhotse downloads; nothing is unpacked before
its checksum is right. A part that was unpacked completely is skipped, and an interrupted download goes on.
"""

import argparse
import hashlib
import sys
import tarfile
from pathlib import Path

from lhotse.utils import resumable_download

ADDRESS = "https://www.openslr.org/resources/12"
SHA256 = {
    "dev-clean": "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
    "dev-other": "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
    "test-clean": "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
    "test-other": "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
    "train-clean-100": "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2",
    "train-clean-360": "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf",
    "train-other-500": "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2",
}
"""Digests of the archives, as torchaudio.datasets.LIBRISPEECH states them; a test compares both."""


def main(argv: list[str] | None = None) -> None:
    """Downloads, checks and unpacks the parts that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--address", default=ADDRESS, help="where the archives are, such as a mirror")
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    for part, digest in SHA256.items():
        # The mark is that of Lhotse's download_librispeech, which skips such a part as well.
        completed = args.directory / "LibriSpeech" / part / ".completed"
        if completed.exists():
            print(f"{part}: unpacked already")
            continue
        archive = args.directory / f"{part}.tar.gz"
        resumable_download(f"{args.address}/{archive.name}", filename=archive)
        unpack(archive, digest, args.directory)
        completed.touch()
        print(f"{part}: checked and unpacked")


def unpack(archive: Path, digest: str, directory: Path) -> None:
    """Unpacks an archive, without links and files outside of `directory`.

    Raises:
        SystemExit: The archive has another SHA-256 than `digest`; nothing is unpacked.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise SystemExit(f"{archive}: SHA-256 is {found}, expected {digest}. Remove the file and download it again.")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")


if __name__ == "__main__":
    main()
    sys.exit(0)
