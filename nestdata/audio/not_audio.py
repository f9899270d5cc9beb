"""Recognises files that are not audio by their first bytes: placeholders, error pages, archives, documents."""

import re

HEAD_BYTES = 1024
"""First bytes of a file that are looked at."""

PLAYLIST_BYTES = 1 << 20
"""First bytes of a file in which FFmpeg looks for a list of other files."""

_AGAIN = "download it again, and check the address and the permissions"
# Texts by their first bytes, in lower case and without white space before them.
_TEXTS = (
    (b"version https://git-lfs.github.com/", "a git-lfs pointer in the place of the audio: run git lfs pull"),
    (b"<!doctype html", f"an HTML page: {_AGAIN}"),
    (b"<html", f"an HTML page: {_AGAIN}"),
    (b"<?xml", f"XML, such as an error of a store: {_AGAIN}"),
    (b"<error>", f"XML, such as an error of a store: {_AGAIN}"),
    (b"#extm3u", "a playlist: download the audio that it names"),
    (b"[playlist]", "a playlist: download the audio that it names"),
    (b"ffconcat version", "a playlist: download the audio that it names"),
)
_BINARIES = (
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"\x1f\x8b", "gzip data: unpack it"),
    (b"%PDF-", "a PDF document, not audio: remove it"),
    (b"\x93NUMPY", "a NumPy array, not audio: write its samples to a WAV or FLAC file"),
    (b"\0\x05\x16\x07", "a file of macOS with properties of another file: remove it"),
)
# Signs of playlists: of HLS, DASH, FFmpeg's own lists, IMF and SDP.
_PLAYLISTS = re.compile(rb"#extm3u|<mpd|ffconcat|compositionplaylist|c=in ", re.IGNORECASE)
# Shorter texts may be the rest of a damaged header.
_MIN_TEXT_BYTES = 64
_TEXT_BYTES = re.compile(rb"[\t\n\r\x20-\x7e\x80-\xff]+")


def kind_of(head: bytes) -> str:
    """Returns what a file is and what to do about it, such as "an HTML page: download it again".

    Args:
        head: The first `HEAD_BYTES` bytes, or all if there are fewer.

    Returns:
        An empty text if it may be audio.
    """
    for start, kind in _BINARIES:
        if head.startswith(start):
            return kind
    if len(head) >= 262 and head[257:262] == b"ustar":
        return "a tar archive: give it as an input, or unpack it"
    if head and not head.strip(b"\0"):
        return f"zeros only, as of a download that was cut off: {_AGAIN}" if len(head) >= 64 else ""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, kind in _TEXTS:
        if text.startswith(start):
            return kind
    if text[:1] in (b"{", b"[") and is_text(head):
        return f"JSON, such as an error of a server: {_AGAIN}"
    if len(head) < _MIN_TEXT_BYTES or not is_text(head):
        return ""
    return f"plain text: {_AGAIN}"


def may_name_files(start: bytes) -> bool:
    """Returns whether FFmpeg may take a file for a list of other files and addresses, which it would open.

    Args:
        start: The first `PLAYLIST_BYTES` bytes, or all if there are fewer.
    """
    # Up to the first null byte, FFmpeg compares them as a text.
    return is_text(start[:HEAD_BYTES]) or bool(_PLAYLISTS.search(start.partition(b"\0")[0]))


def is_text(head: bytes) -> bool:
    """Returns whether the first `HEAD_BYTES` bytes of a file, or all if there are fewer, are text in UTF-8."""
    if not _TEXT_BYTES.fullmatch(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end == len(head) == HEAD_BYTES and error.reason == "unexpected end of data"
    return True
