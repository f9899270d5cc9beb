"""JSON objects of a manifest: one per line, or those of one array, or spread over several lines each.

One per line is the form of NeMo and Lhotse. `json.dump` of a list writes an array; `json.dump(..., indent=2)` and `jq`
spread objects over lines.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestdata.errors import ManifestError
from nestdata.prepare.inputs.lines import MAX_LINE_BYTES, LineSource, open_lines

_CHUNK_BYTES = 1 << 16
_BETWEEN = re.compile(r"[\s,]*")


class ObjectSource(LineSource):
    """The methods of `Source` for a manifest of which each JSON object is an item."""

    is_spread: bool
    """Whether the objects are not one per line; positions are then those of objects."""

    def items(self) -> Iterator[Any]:
        """Yields the objects as JSON texts, blank lines included."""
        return spread_objects(self.path) if self.is_spread else super().items()

    def where(self, number: int) -> str:
        """Returns the path and the number of the line or object, counted from 1."""
        return f"{self.path!s}, object {number}" if self.is_spread else f"{self.path!s}:{number}"

    def count(self) -> int | None:
        """Returns the number of lines; None if it is not that of the objects."""
        return None if self.is_spread else super().count()


def is_spread(line: bytes) -> bool:
    """Returns whether the objects of a manifest are not one per line, given its first line that is not blank."""
    return line.lstrip().startswith(b"[") or line.strip() == b"{"


def spread_objects(path: Path | str) -> Iterator[bytes]:
    """Yields the objects of a JSON array, or objects one after the other, as JSON texts.

    They are read one at a time, so that memory does not depend on the length of the manifest.

    Raises:
        ManifestError: It is not JSON, ends before its end, has something other than objects, or one of more than
            `MAX_LINE_BYTES`; or reading fails.
        StorageError: The store cannot be read.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    scan = json.JSONDecoder().raw_decode
    text, start, number, is_array = "", 0, 1, None
    with open_lines(path) as file:
        while True:
            match = _BETWEEN.match(text, start)
            start = match.end() if match else start
            problem = "ends here, before the end of its JSON"
            if start < len(text):
                if is_array is None:
                    is_array = text[start] == "["
                    start += is_array
                    continue
                if is_array and text[start] == "]":
                    is_array, start = False, start + 1
                    continue
                try:
                    value, end = scan(text, start)
                except RecursionError:
                    raise ManifestError(f"{path}, object {number}: nested too deeply. Fix or drop it.") from None
                except ValueError as error:
                    problem = f"not JSON ({getattr(error, 'msg', error)})"
                else:
                    if not isinstance(value, dict):
                        raise ManifestError(
                            f"{path}, object {number}: {type(value).__name__} where a JSON object was expected. Write "
                            "objects with a key audio_filepath, or a list of paths, one per line and without JSON."
                        )
                    yield text[start:end].encode(errors="surrogateescape")
                    start, number = end, number + 1
                    continue
            if len(text) - start > MAX_LINE_BYTES:
                raise ManifestError(
                    f"{path}, object {number}: {problem}, or longer than {MAX_LINE_BYTES >> 20} MiB. Fix or drop it."
                )
            chunk = file.read(max(_CHUNK_BYTES, len(text) - start))
            if not chunk:
                if start < len(text) or is_array:
                    raise ManifestError(f"{path}, object {number}: {problem}. Check the command that wrote it.")
                return
            text, start = text[start:] + decode(chunk), 0
