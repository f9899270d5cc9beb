"""How far `prepare_corpus` has come."""

from typing import NamedTuple


class PrepareProgress(NamedTuple):
    """What has been probed so far. Results that are reused from an interrupted run count, except for their bytes."""

    entries: int
    """Number of entries: lines of manifests, files, members of shards."""

    total_entries: int | None
    """None if it is unknown, as for shards."""

    shards: int = 0
    """Number of shards: tars and Parquet files."""

    total_shards: int = 0
    """0 if no input has shards."""

    bytes_read: int = 0
    """Bytes read from shards and from stores in this run."""

    hours: float = 0.0
    """Hours of the cuts or, where speech is looked for, of the recordings that were searched."""
