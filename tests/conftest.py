"""What all tests share: one compilation cache, the embedded model, the workloads."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from jaxpaged.config import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]

# One cache for the whole run, child processes included, and none of it in the user's own. Set before JAX is imported.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache-test"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests run on the CPU and compile for GPUs that are not there; the plugin that does so looks for one unless told.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# How long an example takes says nothing on a shared machine.
settings.register_profile("jaxpaged", deadline=None)
settings.load_profile("jaxpaged")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded default model's .gguf file, downloaded once into the user's cache."""
    from jaxpaged.loading.hub import resolve_model

    return Path(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native kernels are compiled, once for the whole run."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def workload_folder() -> Path:
    """The folder with W1.json to W5.json beside the checkout; what needs it is skipped without."""
    folder = ROOT.parent / "shared" / "workloads"
    if not folder.is_dir():
        pytest.skip(f"there are no workloads in {folder}")
    return folder
