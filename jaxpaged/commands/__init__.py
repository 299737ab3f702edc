"""The command line: `jaxpaged X` and `python -m jaxpaged.X`."""
