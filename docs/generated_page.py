"""The command line of the scripts that generate a page."""

import sys
from collections.abc import Iterable
from pathlib import Path


def write_or_check(name: str, lines: Iterable[str]) -> int:
    """Write a page of this folder. With --check it is only compared: 1 if it is out of date, else 0."""
    page, text = Path(__file__).with_name(name), "\n".join(lines) + "\n"
    if "--check" in sys.argv[1:]:
        return int(not page.exists() or page.read_text() != text)
    page.write_text(text)
    return 0
