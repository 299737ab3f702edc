"""`python -m jaxpaged.plan`; `jaxpaged.commands.plan` is what it runs."""

import sys

from jaxpaged.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
