"""Messages of all commands about a path of the wrong kind: what it is, and what to give instead.

Only names are looked at, because a path may be wrong in any way. Nothing is opened.
"""

import re
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Literal

from nestdata.config_checks import nearest_name_hint

Wanted = Literal["a model", "a corpus", "audio", "a configuration"]

_GIVE = {
    "a model": "Give a checkpoint of `nestmodel fit`, a .nemo or safetensors file of NEST, or hf://OWNER/NAME.",
    "a corpus": "Give a folder that `nestdata prepare` has made from audio.",
    "audio": "Give audio files, folders of audio, manifests or corpora; docs/formats.md lists what is read.",
    "a configuration": "Give a YAML file, or a preset: `nestmodel presets` shows them.",
}
_RUN, _MODEL, _FOLDER = "the folder of a run", "a model file", "a folder"
_FOLDERS = {
    "a corpus": ("meta.json", "cuts.jsonl"),
    "a folder of features": ("meta.json", "index.jsonl"),
    "a preview": ("index.html", "batch.json"),
    "a model of transformers": ("config.json",),
}
_FILES = {
    _MODEL: (".ckpt", ".nemo", ".safetensors", ".onnx", ".pt", ".pth"),
    "an audio file": (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".sph", ".aiff", ".webm", ".mp4"),
    "a manifest": (".json", ".jsonl", ".jsonl.gz", ".csv", ".tsv", ".txt", ".scp", ".tar", ".parquet"),
    "a configuration": (".yaml", ".yml"),
}
_IN_RUNS = {"a model": ("newest checkpoint", "checkpoints/*.ckpt"), "a configuration": ("settings", "config.yaml")}


def wrong_path(path: str | Path, wanted: Wanted) -> str:
    """Returns the text that follows a path in a message: what it is instead of what was wanted, and what to give."""
    text, path = str(path), Path(path)
    if not path.exists():
        return _why_missing(text, wanted)
    kind = kind_of(path)
    if wanted == "a corpus" and path.name.endswith(".partial"):
        return "is a corpus that is not complete. Run the same `nestdata prepare` again, which goes on or starts over."
    if wanted == "a corpus" and any((path / name).exists() for name in ("index.npy", "cuts.jsonl")):
        return "is a corpus without meta.json, which is not complete, as if copying it was interrupted. Copy it again."
    if kind == _RUN and wanted in _IN_RUNS and (found := _newest(path, _IN_RUNS[wanted][1])):
        return f"is {kind}. Give its {_IN_RUNS[wanted][0]}, {found}."
    if wanted == "a corpus" and kind in (_FOLDER, "a file", "an audio file", "a manifest"):
        output = Path(f"{path.resolve().name if path.is_dir() else path.name.split('.')[0]}.corpus")
        there = next((each for each in (output, path.with_name(output.name)) if (each / "meta.json").exists()), None)
        remedy = f"Give {there}." if there else f"Run `nestdata prepare {path} -o {output}`, and give {output}."
        return f"is {kind}, not a corpus. {remedy}"
    return f"is {kind}, not {wanted}. {_GIVE[wanted]}"


def kind_of(path: Path) -> str:
    """Returns what a path that exists seems to be, by its name and the names of the files in it."""
    if not path.is_dir():
        return next((kind for kind, ends in _FILES.items() if path.name.lower().endswith(ends)), "a file")
    if _newest(path, "checkpoints/*.ckpt"):
        return _RUN
    return next((kind for kind, names in _FOLDERS.items() if all((path / name).exists() for name in names)), _FOLDER)


def _newest(folder: Path, pattern: str) -> Path | None:
    """Returns the newest file of a run, or of the runs, in a folder; `last.ckpt` rather than the file it links to."""
    places = (pattern, Path(pattern).name, f"version_*/{pattern}", f"*/version_*/{pattern}")
    found = [path for place in places for path in folder.glob(place) if path.is_file()]
    return max(found, key=lambda path: (path.stat().st_mtime, path.stem == "last"), default=None)


def _why_missing(text: str, wanted: Wanted) -> str:
    if re.search(r"[*?[]", text):
        number = len(glob(text))
        what = "is a pattern in quotes. Leave out the quotes, so that the shell gives"
        return f"{what} the {number} paths that fit." if number else "is a pattern that no path fits. Check it."
    if re.match(r"\w[\w+.-]+:/{1,2}[^/]", text):  # a path has lost one of the two slashes
        return f"is a URL, and {wanted} has to be on this machine: download it. {_GIVE[wanted]}"
    path = Path(text).absolute()
    if wanted == "a corpus" and (partial := path.with_name(f"{path.name}.partial")).is_dir():
        return f"does not exist, but {partial.name} does, which is not complete. Run the same `nestdata prepare` again."
    if wanted == "a model" and re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.parent.exists():
        return f"does not exist here. If it is a NEST model on the Hugging Face hub, give hf://{text}."
    if path.is_symlink():
        return f"is a symbolic link to {path.readlink()}, which does not exist. Restore it, or give another path."
    folder = next(parent for parent in path.parents if parent.is_dir())
    # In a huge folder, only some of the names are compared.
    missing, names = path.relative_to(folder).parts[0], [each.name for each in islice(folder.glob("*"), 1000)]
    hint = nearest_name_hint(missing, names, min_similarity=0.6)
    return f"does not exist: there is no {missing!r} in {folder}{hint}. Check the path. {_GIVE[wanted]}"
