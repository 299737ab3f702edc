"""Which room may import which: one table, checked against every import statement of the product."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxpaged", "models", "server", "pallas_kernels")

# Modules that must answer, or run beside HTTP, without JAX.
NO_JAX = ("core", "text", "frontend", "scheduling", "loading.host_memory", "loading.hub", "loading.json_files",
          "loading.gguf", "commands.cli")
ENGINE_THIRD = ("jax", "flax", "llguidance", "numpy", "tqdm")
HTTP_THIRD = ("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools", "yaml", "tqdm")

# room: (third-party packages, rooms below it) that its modules may import, besides the standard library and itself.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "core": ((), ()),
    "pallas_kernels": (("jax", "numpy"), ()),
    "server.parsers": ((), ("core",)),
    "scheduling.scheduler_output": ((), ("core",)),
    "scheduling": ((), ("core", "scheduling.scheduler_output")),
    "models": (("flax", "jax", "numpy"), ("core", "pallas_kernels")),
    "loading": (("flax", "gguf", "huggingface_hub", "jax", "ml_dtypes", "numpy", "orbax", "safetensors",
                 "tensorstore", "tqdm"),
                ("core", "models")),
    "execution": (("flax", "jax", "numpy"), ("core", "models", "pallas_kernels", "scheduling.scheduler_output")),
    "text": (("jinja2", "llguidance", "numpy", "tokenizers", "transformers"), ("core", "loading")),
    "frontend": (("prometheus_client",), ("core", "loading", "text")),
    "server.protocol": (("fastapi", "starlette", "pydantic"), ("core", "text", "server.parsers")),
    "server.sandbox": ((), ("core", "text")),
    "engine": (ENGINE_THIRD, ("core", "execution", "frontend", "loading", "models", "pallas_kernels", "scheduling",
                              "text")),
    "server.engine": ((), ("core", "engine", "frontend", "server.sandbox", "server.logs")),
    "server.routes": (("fastapi", "starlette", "pydantic"),
                      ("core", "frontend", "text", "server.args", "server.engine", "server.parsers",
                       "server.protocol")),
    "server": (HTTP_THIRD, ("core", "frontend", "loading", "server.args", "server.engine", "server.logs",
                            "server.protocol", "server.routes", "server.sandbox")),
    "commands": (("jax", "flax", "tqdm"), ("core", "engine", "execution", "loading", "models", "text")),
    "entry": ((), ("core", "commands", "engine")),
}
# Modules that do not lie on their room's floor. Those without a room start the commands; those of the server are what
# its rooms read.
ROOM_OF = {"": "entry", "__main__": "entry", "plan": "entry", "compile": "entry", "convert": "entry",
          "errors": "entry", "models.__main__": "entry", "run_batch": "server",
           "server.args": "server.args", "server.logs": "server.logs"}
ROOMS |= {"server.args": (("yaml",), ("core", "server.parsers")), "server.logs": ((), ())}
MAX_FLOORS = 9


def _modules() -> Iterator[tuple[str, Path]]:
    """Each module's name inside jaxpaged, and its file; links are not followed."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not any((ROOT / parent).is_symlink() for parent in file.relative_to(ROOT).parents):
                yield name.removeprefix("jaxpaged").removeprefix("."), file


MODULES = dict(_modules())


def _room(module: str) -> str:
    if module in ROOM_OF:
        return ROOM_OF[module]
    parts = module.split(".")
    return next(room for end in (2, 1) if (room := ".".join(parts[:end])) in ROOMS)


def _imports(module: str) -> Iterator[str]:
    """What the module's import statements name, also those inside functions: `package.module` or `package`."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in whole if name.removeprefix("jaxpaged.") in MODULES]
            yield from modules
            if len(modules) < len(whole):
                yield node.module


def _inside(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    room = _room(module)
    third, below = ROOMS[room]
    for name in _imports(module):
        package, _, part = name.partition(".")
        if package == "jaxpaged":
            # bare `jaxpaged`: for the version
            allowed = not part or _room(part) in (room, *below)
            assert allowed, f"{module}, in {room}, must not import {name}, in {_room(part)}"
        else:
            assert package in third or package in sys.stdlib_module_names, f"{module} must not import {name}"
            assert package != "jax" or not _inside(module, NO_JAX), f"{module} must not import JAX"


def test_rooms_lie_on_at_most_nine_floors() -> None:
    """A room is one floor above the highest room that it may import, so there is no circle."""
    floors: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...] = ()) -> int:
        assert room not in above, f"a circle of rooms: {' -> '.join((*above, room))}"
        if room not in floors:
            floors[room] = 1 + max((floor(lower, (*above, room)) for lower in ROOMS[room][1]), default=0)
        return floors[room]

    assert max(map(floor, ROOMS)) <= MAX_FLOORS


def test_modules_do_not_import_in_a_circle() -> None:
    imported = {module: {name.removeprefix("jaxpaged").removeprefix(".") for name in _imports(module)
                         if name.startswith("jaxpaged.")} & set(MODULES) for module in MODULES if module}
    while imported:
        leaves = {module for module, names in imported.items() if not names & set(imported)}
        assert leaves, f"a circle among {sorted(imported)}"
        imported = {module: names for module, names in imported.items() if module not in leaves}


def test_no_room_is_allowed_what_it_does_not_use() -> None:
    used = {(_room(module), _room(name.removeprefix("jaxpaged."))) for module in MODULES
            for name in _imports(module) if name.startswith("jaxpaged.")}
    allowed = {(room, lower) for room, (_, below) in ROOMS.items() for lower in below}
    unused = sorted(allowed - used)
    assert not unused, f"the table allows what no module does: {unused}"


def test_third_party_imports_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~;\[ ]", line)[0].lower().replace("-", "_") for line in project["dependencies"]}
    declared = declared - {"pyyaml", "orbax_checkpoint"} | {"yaml", "orbax"}
    # What FastAPI and Orbax are made of, which their users import too.
    declared |= {"starlette", "pydantic", "tensorstore"}
    used = {name.split(".")[0] for module in MODULES for name in _imports(module)} - {"jaxpaged"}
    assert used - set(sys.stdlib_module_names) <= declared


def _loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after running `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("command", ["server", "plan", "convert", "compile", "models", "run_batch"])
def test_help_loads_neither_jax_nor_fastapi(command: str) -> None:
    """What makes `--help` quick."""
    loaded = _loaded_by(f"import runpy, sys\nsys.argv = ['jaxpaged.{command}', '--help']\n"
                        f"try:\n    runpy.run_module('jaxpaged.{command}', run_name='__main__')\n"
                        "except SystemExit as end:\n    assert not end.code\n"
                        "else:\n    raise AssertionError('--help did not exit')")
    assert not loaded & {"jax", "flax", "fastapi", "uvicorn", "transformers", "torch", "numpy"}


@pytest.mark.parametrize(
    "module", ["jaxpaged", "jaxpaged.server.app", "jaxpaged.text.tokenizer", "jaxpaged.loading.gguf"])
def test_the_http_side_loads_no_jax(module: str) -> None:
    assert not _loaded_by(f"import {module}") & {"jax", "flax", "torch"}


def test_the_package_loads_nothing_else() -> None:
    assert not _loaded_by("import jaxpaged") & {"numpy", "transformers", "fastapi"}
