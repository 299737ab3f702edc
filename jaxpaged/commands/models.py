"""`python -m jaxpaged.models`: the supported architectures of config.json, one per line."""

import argparse
from collections.abc import Sequence

from jaxpaged.commands.quiet_jax import import_jax


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.models") -> int:
    """Run the command and return its exit code."""
    argparse.ArgumentParser(prog=prog, description="List the supported architectures, as config.json "
                                                   "names them.").parse_args(argv)
    import_jax()
    from jaxpaged.models.registry import FAMILIES

    print(*sorted(FAMILIES), sep="\n")
    return 0
