"""Imports JAX for the commands."""

from jaxpaged.core.quiet_start import without_cuda_notices


def import_jax() -> None:
    """Import JAX without its CUDA plugin's notices; before any module that imports it, and late: `--help` is quick."""
    with without_cuda_notices():
        import jax  # noqa: F401
