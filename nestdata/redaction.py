"""Hides what may be secret in URLs, wherever they are in a text: user names, passwords, queries and fragments.

Errors, lists of rejects, pages and the commands pass all text through `redacted` before it leaves them. What is hidden
is decided by form alone, without a list of names that secrets may have.
"""

import re

# At least two slashes, or one after two letters: `Path` removes the second slash, and `C:/` is a drive. Slashes may be
# escaped, as in JSON. The scheme itself is not matched, because that takes quadratic time in a long word.
_START = re.compile(r"(?<=[A-Za-z0-9+.-]):(?:\\*/){2,}|(?<=[A-Za-z0-9+.-]{2}):\\*/")
_URL = re.compile(r"\S*")
_AT = re.compile(r"@|%(?:25)*40")
_QUERY = re.compile(r"[?#;]")
# What a bucket or a host may be. Anything else with a colon is a user name and a password.
_AUTHORITY = re.compile(r"[^:]*(?::\d+)?|\[[0-9A-Fa-f:.]+\](?::\d+)?")
# The end of the id of a cut that is a span of a file or a window of a cut.
_SPAN = re.compile(r"(?:@\d{1,9}\.\d{3}(?:\+\d{1,9}\.\d{3})?){1,3}$")
_PUNCTUATION = ":;,.!?'\"`)]}>"
_HIDDEN = "***"


def redacted(text: str) -> str:
    """Returns a text in which every URL is shown without its secrets; all other text is unchanged.

    After each `scheme://`, everything up to the last `@` is hidden, whether or not a slash comes first, and everything
    from `?`, `#` or `;` on. A URL ends at white space. A user name with a password may contain white space: then it
    ends at the last `@` of the text. A second call changes nothing.
    """
    if ":" not in text or "/" not in text:
        return text
    last_at = max((match.end() for match in _AT.finditer(text)), default=0)
    parts, done = [], 0
    for start in _START.finditer(text):
        if start.start() < done:
            continue
        end = _end_of_word(text, start.end())
        word = text[start.end() : end]
        if last_at > end and not _AT.search(word) and not has_plain_authority(word.rstrip(_PUNCTUATION)):
            end = _end_of_word(text, last_at)
        url = text[start.end() : end]
        bare = url.rstrip(_PUNCTUATION)
        parts += [text[done : start.end()], _without_secrets(bare), url[len(bare) :]]
        done = end
    return "".join([*parts, text[done:]])


def redacted_url(url: str) -> str:
    """Returns a single URL without its secrets, for text that may hold white space in its user name or query."""
    return redacted(re.sub(r"\s", "%20", url))


def has_plain_authority(rest: str) -> bool:
    """Returns whether a URL without its scheme begins with a bucket, or a host and perhaps a port, and nothing else."""
    authority = rest.partition("/")[0]
    return _AUTHORITY.fullmatch(authority) is not None and not _AT.search(authority)


def _without_secrets(rest: str) -> str:
    """Returns a URL without its scheme and its secrets."""
    span = _SPAN.search(rest)
    if span and "/" in (body := rest[: span.start()]) and has_plain_authority(body) and not _AT.search(body):
        return _without_query(body) + span[0]
    last = max(_AT.finditer(rest), key=re.Match.start, default=None)
    if last is None:
        return _without_query(rest) if has_plain_authority(rest) else _HIDDEN
    if _QUERY.search(rest, 0, last.start()):  # the end may belong to the query
        return _HIDDEN
    return f"{_HIDDEN}@{_without_query(rest[last.end() :])}"


def _without_query(rest: str) -> str:
    query = _QUERY.search(rest)
    return rest[: query.end()] + _HIDDEN if query else rest


def _end_of_word(text: str, start: int) -> int:
    match = _URL.match(text, start)
    return match.end() if match else start
