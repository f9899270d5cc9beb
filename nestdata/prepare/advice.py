"""What to do about rejected audio, by the reason of the reject."""

from typing import get_args

from nestdata.prepare.inputs.audio import RejectReason

ADVICE: dict[RejectReason, str] = {
    "missing": "Check the paths; docs/formats.md says where relative ones start.",
    "not_a_file": "Name audio files: directories, pipes, sockets and devices are never opened.",
    "empty": "Copy the files again, or drop the lines.",
    "unreadable": "Convert the files again.",
    "truncated": "Copy the files again: they are shorter than their own headers say.",
    "not_audio": "Get the audio in their place, as the details say.",
    "wrong_duration": "Rebuild the manifest from the current audio.",
    "not_finite": "Convert the files again: they hold NaN or Inf.",
    "silent": "Check that --channel names the channel with speech.",
    "no_speech": (
        "No speech was found: these are pauses, music or noise, or --channel names a channel without speech. Prepare "
        "noise without --segment and --min-speech-share."
    ),
    "little_speech": "Lower --min-speech-share to keep them.",
    "too_short": "Lower --min-seconds to keep them.",
    "too_long": "Raise --max-seconds, or cut them with --window-seconds.",
    "duplicate_id": "Drop one of the two entries, or give each line of the same file its own offset.",
    "rate_too_low": "Lower --min-rate to keep them.",
    "no_such_channel": "Give another --channel.",
    "changed": "Prepare again when nothing writes to the shards any more.",
    "corrupt": "Copy the shards again: their bytes do not have the checksums in the manifest.",
    "no_such_member": "Check that the archives belong to this manifest.",
    "ambiguous_member": "Pack the archives again, with one member for each name.",
    "shard_unreadable": "Copy the archives again.",
    "compressed_tar": "Decompress the archives: members of compressed ones cannot be read at random.",
    "unsafe_member": "Pack the archives again, without links, devices, and names outside of the archive.",
    "too_large": "Divide the files: members of 4 GiB or more have no address.",
    "invalid_url": "Give URLs of object stores, without user names, passwords, queries and fragments.",
    "malformed_row": "Fix these rows, or drop them.",
    "command": "Commands are not run. Write the audio to files first, and name these.",
}

assert set(ADVICE) == set(get_args(RejectReason))
