"""The map in pyproject.toml and the links in the tree name the same packages, and builds need no links."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTER = ("models", "server", "pallas_kernels")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _packages_on_disk() -> set[str]:
    found = set()
    for top in ("jaxpaged", *OUTER):
        prefix = "" if top == "jaxpaged" else "jaxpaged."
        for file in (ROOT / top).rglob("__init__.py"):
            folder = file.parent.relative_to(ROOT)
            if not any((ROOT / part).is_symlink() for part in (folder, *folder.parents)):
                found.add(prefix + ".".join(folder.parts))
    return found


def test_packages_are_the_folders_with_an_init_file() -> None:
    assert set(SETUPTOOLS["packages"]) == _packages_on_disk()


def test_every_module_lies_in_a_package() -> None:
    for top in ("jaxpaged", *OUTER):
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has modules and no __init__.py"


def test_the_map_names_the_outer_folders() -> None:
    assert SETUPTOOLS["package-dir"] == {"jaxpaged": "jaxpaged"} | {f"jaxpaged.{name}": name for name in OUTER}


@pytest.mark.parametrize("name", OUTER)
def test_links_are_relative(name: str) -> None:
    link = ROOT / "jaxpaged" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_committed_and_nothing_ignored_is() -> None:
    modes = [line.split()[0] for line in _git("ls-files", "-s", *(f"jaxpaged/{name}" for name in OUTER))]
    assert modes == ["120000"] * len(OUTER)
    ignored = _git("ls-files", "--cached", "--ignored", "--exclude-standard")
    assert not ignored, f"{len(ignored)} files are tracked although .gitignore names them, such as {ignored[0]}"


def _git(*args: str) -> list[str]:
    done = subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_a_wheel_built_from_the_sdist_holds_only_jaxpaged(tmp_path: Path) -> None:
    """Without the links, as on a machine that cannot make any."""
    tree = tmp_path / "tree"
    for folder in ("jaxpaged", *OUTER):
        for file in (ROOT / folder).rglob("*"):
            # rglob does not descend into links, and a link itself is not copied.
            if file.is_file() and not file.is_symlink() and file.suffix != ".pyc":
                target = tree / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "Makefile"):
        (tree / name).write_bytes((ROOT / name).read_bytes())

    with tarfile.open(_build("build_sdist", tree, tmp_path)) as sdist:
        sdist.extractall(tmp_path, filter="data")
        unpacked = tmp_path / sdist.getnames()[0].split("/")[0]
    with zipfile.ZipFile(_build("build_wheel", unpacked, tmp_path)) as wheel:
        names = wheel.namelist()

    modules = {name for name in names if ".dist-info/" not in name}
    expected = {str(file.relative_to(tree)) for file in tree.rglob("*.py")}
    expected = {name if name.startswith("jaxpaged/") else f"jaxpaged/{name}" for name in expected}
    assert {name for name in modules if name.endswith(".py")} == expected
    assert all(name.startswith("jaxpaged/") for name in modules)
    assert {"jaxpaged/py.typed", "jaxpaged/pallas_kernels/native/paged_attention.cc",
            "jaxpaged/pallas_kernels/native/linear.cc", "jaxpaged/pallas_kernels/native/lanes.h"} <= modules
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def _build(hook: str, tree: Path, out: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]
