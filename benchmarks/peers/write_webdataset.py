"""Writes audio files as WebDataset: `python write_webdataset.py MANIFEST PATTERN`, with the package webdataset.

The key of a file is its path without suffix; dots in it become underscores, since a key ends at the first dot.
"""

import json
import sys
from pathlib import Path

import webdataset

with webdataset.ShardWriter(sys.argv[2], maxcount=50, verbose=0) as writer:
    for line in Path(sys.argv[1]).read_text().splitlines():
        row = json.loads(line)
        path = Path(row["audio_filepath"])
        key = str(path.with_suffix("")).lstrip("/").replace(".", "_")
        writer.write({"__key__": key, path.suffix[1:]: path.read_bytes(), "json": {"speaker": row.get("speaker", "")}})
