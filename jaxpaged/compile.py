"""`python -m jaxpaged.compile`; `jaxpaged.commands.compile` is what it runs."""

import sys

from jaxpaged.commands.compile import main

if __name__ == "__main__":
    sys.exit(main())
