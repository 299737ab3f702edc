"""`python -m jaxpaged.convert`; `jaxpaged.commands.convert` is what it runs."""

import sys

from jaxpaged.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
