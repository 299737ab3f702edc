"""JAX's persistent cache of compiled programs, in a folder of ours unless the user has named one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.core.trusted_files import UntrustedFileError, make_private
from jaxpaged.engine.planning import Report
from jaxpaged.loading.hub import cache_dir


@contextlib.contextmanager
def cached_compilation(report: Report, *, keep: bool) -> Iterator[None]:
    """Inside, programs are compiled once for all processes.

    Args:
        keep: leave JAX's settings so; otherwise they are set back at the end, since they are the whole process's.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        yield
        return
    folder = cache_dir() / "compiled"
    try:
        make_private(folder)  # programs are code
    except (OSError, UntrustedFileError) as error:
        report(f"compiled programs are not cached: {error}")
        yield
        return
    ours: dict[str, Any] = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0,
                            "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in ours}
    _update(ours)
    try:
        yield
    finally:
        if not keep:
            _update(before)
            compilation_cache.reset_cache()  # else JAX goes on with the folder that it has opened


def _update(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
