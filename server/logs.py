"""Logging setup for both processes."""

import logging
import sys


def set_up_logging(uvicorn_level: str = "info") -> None:
    """Send log lines of jaxpaged and uvicorn to stderr.

    Args:
        uvicorn_level: lowest level of the HTTP server's own lines; "trace" includes more than "debug".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    levels = {"jaxpaged": logging.INFO, "uvicorn": 5 if uvicorn_level == "trace" else uvicorn_level.upper()}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
