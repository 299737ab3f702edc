"""`python -m jaxpaged.models`; `jaxpaged.commands.models` is what it runs."""

import sys

from jaxpaged.commands.models import main

if __name__ == "__main__":
    sys.exit(main())
