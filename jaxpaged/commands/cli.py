"""The console script `jaxpaged`."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from jaxpaged import __version__

# Name, module with its `main`, description. Imported on demand, so that --version is quick.
_COMMANDS = (
    ("serve", "server.__main__", "serve a model over the OpenAI protocol"),
    ("run-batch", "server.batch.command", "answer the requests of a file"),
    ("plan", "commands.plan", "print how a model fits a device's memory"),
    ("compile", "commands.compile", "compile a model's programs ahead of time"),
    ("convert", "commands.convert", "save a model with Orbax"),
    ("models", "commands.models", "list the architectures that can be served"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None for those of the process.
    """
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("--version", "-v") and not arguments:
        print(f"jaxpaged {__version__}")
        return 0
    if command in ("-h", "--help"):
        print("usage: jaxpaged COMMAND [arguments]\n       jaxpaged --version\n")
        print(*(f"{name:11}{what}" for name, _, what in _COMMANDS), sep="\n")
        print("\n`jaxpaged COMMAND --help` lists a command's arguments")
        return 0
    for name, module, _ in _COMMANDS:
        if command == name:
            code: int = import_module(f"jaxpaged.{module}").main(arguments, prog=f"jaxpaged {name}")
            return code
    names = [name for name, *_ in _COMMANDS]
    near = difflib.get_close_matches(command, names, 1)
    hint = f"did you mean `jaxpaged {near[0]}`?" if near else f"the commands are {', '.join(names)}"
    print(f"jaxpaged: error: unknown command {command}; {hint}", file=sys.stderr)
    return 2
