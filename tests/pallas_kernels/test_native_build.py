"""How the native CPU kernels are built and chosen."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.trusted_files import check_trusted
from jaxpaged.engine.engine import Engine
from jaxpaged.pallas_kernels import native_linear
from jaxpaged.pallas_kernels.native_build import build
from tests.support.tiny_llama import ENGINE_ARGS, write_model

KERNELS = [native_linear.KERNEL]


@pytest.fixture(scope="module", autouse=True)
def built(native_folder: Path) -> None:
    failure = build(native_folder, KERNELS)
    if failure:
        pytest.skip(f"native kernels cannot be built here: {failure}")


def test_no_compiler_is_a_reason_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in (build(tmp_path, KERNELS) or "")


@pytest.mark.parametrize("script", ["echo 'x.cc:1: error: no such thing' >&2; exit 1", "exit 3", "true"])
def test_a_broken_compiler_is_a_reason_and_no_error(script: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    failure = build(tmp_path / "cache", KERNELS)
    assert failure and "\n" not in failure
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_library_is_built_again_with_one_warning(damage: str, native_folder: Path, tmp_path: Path,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    assert build(native_folder, KERNELS) is None
    [good] = native_folder.glob("linear-*.so")
    content = good.read_bytes()
    bad = {"cut": content[: len(content) // 2], "changed": content[:-100] + bytes(100), "empty": b""}[damage]
    (tmp_path / good.name).write_bytes(bad)
    assert build(tmp_path, KERNELS) is None
    [record] = caplog.records
    assert "damaged" in record.getMessage() and good.name in record.getMessage()
    [made] = tmp_path.glob("linear-*.so")
    assert len(made.read_bytes()) == len(content) and made.stat().st_mode & 0o777 == 0o700
    assert build(tmp_path, KERNELS) is None and len(caplog.records) == 1


def test_a_library_that_others_can_write_is_not_loaded(native_folder: Path, tmp_path: Path,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    assert build(native_folder, KERNELS) is None
    [good] = native_folder.glob("linear-*.so")
    shutil.copy(good, tmp_path)
    (tmp_path / good.name).chmod(0o775)
    assert build(tmp_path, KERNELS, check=check_trusted) is None
    [record] = caplog.records
    assert "written by others" in record.getMessage()
    [made] = tmp_path.glob("linear-*.so")
    check_trusted(made)


def test_a_second_folder_in_one_process_is_fine(native_folder: Path, tmp_path: Path) -> None:
    assert build(native_folder, KERNELS) is None
    [library] = native_folder.glob("linear-*.so")
    shutil.copy(library, tmp_path)
    assert build(tmp_path, KERNELS) is None
    assert (native_linear.linear(jnp.ones((2, 5)), jnp.ones((5, 3))) == 5).all()


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert build(tmp_path / "file" / "folder", KERNELS)


def test_a_second_process_reads_the_program_from_the_persistent_cache(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        import jax, jax.numpy as jnp
        from jaxpaged.pallas_kernels import native_linear
        from jaxpaged.pallas_kernels.native_build import build
        folder = Path(sys.argv[1])
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        events = []
        jax.monitoring.register_event_listener(lambda name, **more: events.append(name))
        assert build(folder, [native_linear.KERNEL]) is None
        events.clear()
        run = jax.jit(lambda x: native_linear.linear(x, jnp.ones((3, 4))))
        assert (run(jnp.ones((2, 3))) == 3).all()
        print(events.count("/jax/compilation_cache/cache_misses"), end=" ")
        print(events.count("/jax/compilation_cache/cache_hits"))
    """)
    root = Path(__file__).resolve().parents[2]
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seen.append([int(count) for count in done.stdout.split()])
    assert seen[0][0] > 0 and seen[1][0] == 0 and seen[1][1] > 0
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_the_engine_says_why_it_runs_on_xla_and_refuses_where_native_is_demanded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    kwargs: dict[str, Any] = {"model": str(model), **ENGINE_ARGS}
    for part in ("cpu_attention", "cpu_linear"):
        with pytest.raises(ConfigError, match="float32"):
            Engine(EngineConfig(**kwargs | {part: "native", "dtype": "bfloat16"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    Engine(EngineConfig(**kwargs), lines.append).shutdown()
    [line] = [line for line in lines if "no C++ compiler" in line]
    assert "attention and linear layers" in line
    for part in ("cpu_attention", "cpu_linear"):
        with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
            Engine(EngineConfig(**kwargs | {part: "native"}))
    lines.clear()
    Engine(EngineConfig(cpu_attention="xla", cpu_linear="xla", **kwargs), lines.append).shutdown()
    assert not [line for line in lines if "no C++ compiler" in line]
