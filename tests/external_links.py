"""Asks for every address that the documentation links to, and lists those that do not answer.

    python -m tests.external_links

Needs a network; some servers refuse programs, so an address that fails here may work in a browser.
"""

import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_S = 20


def addresses() -> dict[str, str]:
    """Returns the addresses in committed Markdown, each with the first page that has it."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    found: dict[str, str] = {}
    for name in listed.stdout.splitlines():
        for address in re.findall(r"\]\((https?://[^)\s]+)\)", (REPOSITORY / name).read_text(encoding="utf-8")):
            found.setdefault(address, name)
    return found


def problem(address: str) -> str | None:
    """Returns why an address cannot be opened."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def main() -> int:
    """Prints the addresses that fail; returns 1 if there are any."""
    found = addresses()
    with ThreadPoolExecutor(8) as pool:
        problems = dict(zip(found, pool.map(problem, found), strict=True))
    for address, reason in problems.items():
        if reason:
            print(f"{found[address]}: {address}: {reason}")
    print(f"{len(found)} addresses, {sum(map(bool, problems.values()))} problems")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
