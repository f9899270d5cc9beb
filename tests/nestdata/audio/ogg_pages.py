"""Ogg as tests write it, without checksums."""


def page(body: bytes, number: int, flags: int = 0, serial: int = 7) -> bytes:
    """Returns a page of Ogg that holds one packet; its checksum is not set."""
    segments = bytes([255] * (len(body) // 255) + [len(body) % 255])
    head = b"OggS\0" + bytes([flags]) + bytes(8) + serial.to_bytes(4, "little") + number.to_bytes(4, "little")
    return head + bytes(4) + bytes([len(segments)]) + segments + body


def flac_in_ogg(content: bytes, serial: int = 7) -> bytes:
    """Puts a FLAC file into Ogg, in packets of 1000 bytes; a decoder of FLAC does not need those of frames."""
    pieces = [content[start : start + 1000] for start in range(0, len(content), 1000)]
    pages = [page(b"\x7fFLAC\1\0\0\1" + pieces[0], 0, 2, serial)]
    return b"".join(
        pages + [page(piece, i + 1, 4 if i + 2 == len(pieces) else 0, serial) for i, piece in enumerate(pieces[1:])]
    )
