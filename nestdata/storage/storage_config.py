"""Settings for reading and writing files and objects. Credentials are not settings: they come from the environment."""

from dataclasses import dataclass

from nestdata.config_checks import require, require_at_least
from nestdata.field_docs import with_field_docs

MIB = 1 << 20


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """Patience, timeouts and limits for reading and writing objects of stores."""

    patience_s: float = 300.0
    """Seconds for which a request to an object store is repeated that fails for a transient reason, before
    `StorageError` is raised."""

    first_contact_s: float = 30.0
    """The same for a store that has not answered this process yet, because a wrong host name or port is then the
    likeliest reason. Limited by `patience_s`."""

    max_requests: int = 32
    """Largest number of simultaneous requests to object stores; further threads wait."""

    connect_timeout_s: float = 5.0
    """Seconds for connecting to a server."""

    stall_timeout_s: float = 15.0
    """Seconds without a byte from the server after which a request is given up and repeated."""

    part_bytes: int = 8 * MIB
    """Size of the parts in which streams and whole objects are read."""

    parts_ahead: int = 3
    """Parts that a stream requests beyond the one that is being read, so a stream needs up to
    `part_bytes * (parts_ahead + 1)` bytes of memory."""

    def __post_init__(self) -> None:
        require_at_least(0, "storage", self, "patience_s", "first_contact_s", "parts_ahead")
        require_at_least(1, "storage", self, "max_requests", "part_bytes")
        for name in ("connect_timeout_s", "stall_timeout_s"):
            require(getattr(self, name) > 0, f"storage.{name}", getattr(self, name), "more than 0 seconds")
