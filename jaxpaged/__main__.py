"""`python -m jaxpaged COMMAND`: the console script without its being on the path."""

import sys

from jaxpaged.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
