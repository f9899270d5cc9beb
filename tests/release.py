"""Builds the files of a release twice, from the last commit, and checks that both builds are equal.

    python -m tests.release DIST

The source archive and the wheel are built in two directories that contain what is committed and nothing else. Both
must have the same bytes; `twine check --strict` must accept them; and the first section of CHANGELOG.md must be that
of the version, with a date.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def repack(source: Path, target: Path, time: int) -> None:
    """Writes a source archive again, without what depends on the build: times, owners, rights and order."""
    with tarfile.open(source) as old, target.open("wb") as file:
        # The name in the header of gzip would be that of the file.
        with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=time) as zipped:
            with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new:
                for member in sorted(old.getmembers(), key=lambda member: member.name):
                    clean = tarfile.TarInfo(member.name)
                    clean.type, clean.size, clean.mtime = member.type, member.size, time
                    clean.mode = 0o755 if member.isdir() else 0o644
                    data = old.extractfile(member) if member.isfile() else None
                    new.addfile(clean, io.BytesIO(data.read()) if data else None)


def build(commit: str, time: int, output: Path) -> None:
    """Builds the archive and the wheel of a commit in an empty directory."""
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        sources, built = Path(name, "sources"), Path(name, "built")
        archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(sources, filter="data")
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(time)}
        command = [sys.executable, "-m", "build", "--outdir", str(built), str(sources)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        for path in built.iterdir():
            if path.suffix == ".gz":
                repack(path, output / path.name, time)
            else:
                shutil.copyfile(path, output / path.name)


def changelog_problem(changelog: str, version: str) -> str | None:
    """Returns what is wrong with the first section of the changelog."""
    (first, *_) = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", first):
        return None
    return f"CHANGELOG.md starts with the section {first!r}: expected '{version} (YYYY-MM-DD)'."


def main(dist: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout

    if changes := git("status", "--porcelain"):
        sys.exit(f"commit these changes first:\n{changes}")
    commit, time = git("log", "-1", "--format=%H %ct").split()
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="release-") as again:
        build(commit, int(time), dist)
        build(commit, int(time), Path(again, "dist"))
        for path in sorted(dist.iterdir()):
            if path.read_bytes() != Path(again, "dist", path.name).read_bytes():
                sys.exit(f"{path.name}: two builds of {commit[:7]} differ")
            print(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()], check=True)
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if problem := changelog_problem((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), version):
        sys.exit(problem)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
