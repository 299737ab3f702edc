"""The console script `jaxpaged`."""

import sys
from collections.abc import Sequence

from jaxpaged import __version__

_USAGE = """usage: jaxpaged serve [MODEL] [flags]
       jaxpaged --version

serve   serve a model over the OpenAI protocol; `jaxpaged serve --help` lists the flags
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-v"]):
        print(f"jaxpaged {__version__}")
        return 0
    if arguments and arguments[0] == "serve":
        # imported late: a command line tool answers --version without reading the server
        from jaxpaged.server.__main__ import main as serve

        return serve(arguments[1:], prog="jaxpaged serve")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    print(f"jaxpaged: error: unknown command {arguments[0]}; the command is `jaxpaged serve`", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
