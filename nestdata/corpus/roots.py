"""Names relative to the root of a corpus: the deepest folder that holds all of its shards."""

from nestdata.storage import is_url


def relative_name(location: str, root: str) -> str:
    """Returns the name of a shard in `shards.jsonl`: relative to the root, or absolute if it is outside of the root."""
    inside = root.rstrip("/") + "/"
    return location[len(inside) :] if root and location.startswith(inside) else location


def common_folder(first: str, second: str) -> str:
    """Returns the deepest folder that holds two folders, both absolute paths or URLs; empty if there is none."""
    if is_url(first) != is_url(second):
        return ""
    parts = []
    for one, other in zip(first.rstrip("/").split("/"), second.rstrip("/").split("/"), strict=False):
        if one != other:
            break
        parts.append(one)
    # The first three parts of a URL are its scheme and its bucket or host. The first part of a path is empty.
    if is_url(first) and len(parts) < 3:
        return ""
    return "/".join(parts) or "/"
