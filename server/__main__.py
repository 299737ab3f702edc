"""`python -m jaxpaged.server [MODEL] [flags]`: read the flags, then serve until stopped."""

import sys
from collections.abc import Sequence

from jaxpaged.server.args import parse_args


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.server") -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    Args:
        argv: the arguments after the program's name; None for those of the process.
        prog: what the user typed, for help and errors.
    """
    arguments = parse_args(sys.argv[1:] if argv is None else argv, prog)
    from jaxpaged.server.serve import serve  # imported late: --help and typos answer before the web framework loads

    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
