"""`python -m jaxpaged.run_batch`; `jaxpaged.server.batch.command` is what it runs."""

import sys

from jaxpaged.server.batch.command import main

if __name__ == "__main__":
    sys.exit(main())
