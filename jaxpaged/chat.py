"""`python -m jaxpaged.chat`; `jaxpaged.commands.chat` is what it runs."""

import sys

from jaxpaged.commands.chat import main

if __name__ == "__main__":
    sys.exit(main())
