"""`python -m jaxpaged.models`: the architectures of config.json that can be served, one a line."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.models") -> int:
    """Run the command and return its exit code."""
    argparse.ArgumentParser(prog=prog, description="List the architectures, as config.json names them, that can be "
                                                   "served.").parse_args(argv)
    from jaxpaged.models.registry import FAMILIES  # only here: --help answers at once

    print(*sorted(FAMILIES), sep="\n")
    return 0
