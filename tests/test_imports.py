"""Who may import whom: one table, checked against every import statement of the product."""

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

TOP = ("errors", "config", "flags", "limits", "quiet_start", "sampling_params", "outputs", "messages")
HTTP_SIDE = ("bounded_cache", "tokenizer", "token_bytes", "gguf_tokenizer", "stand_ins", "chat_template",
             "conversation", "input_processor", "output_processor", "choice", "detokenizer", "beam_search",
             "embeddings", "metrics", "structured_outputs", "loading.host_memory", "loading.hub", "loading.json_files")
NO_JAX = (*HTTP_SIDE, "loading.gguf", "cli")
ENGINE_THIRD = ("jax", "flax", "llguidance", "numpy", "tokenizers", "transformers", "jinja2", "prometheus_client",
                "tqdm")

# room: (third-party packages, parts of jaxpaged) that its modules may import, besides the standard library.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "top": ((), TOP),
    "scheduling": ((), ("scheduling", *TOP)),
    "pallas_kernels": (("jax", "numpy"), ("pallas_kernels",)),
    "models": (("flax", "jax", "numpy"), ("models", "pallas_kernels", "errors", "execution.sharding")),
    "execution": (("flax", "jax", "numpy"), ("execution", "models", "pallas_kernels", "scheduling", *TOP)),
    "loading": (("flax", "gguf", "huggingface_hub", "jax", "ml_dtypes", "numpy", "orbax", "safetensors", "tqdm"),
                ("loading", "models", *TOP)),
    "engine": (ENGINE_THIRD, ("",)),  # every part; what may import the server is checked apart
    "server": (("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus_client", "yaml"),
               ("server", *HTTP_SIDE, *TOP)),
}
# The module that starts the engine's process also runs in it.
ALSO: dict[str, tuple[str, ...]] = {"server.engine_process": ("engine", "engine_loop")}


def _modules() -> Iterator[tuple[str, Path]]:
    """Each module's name inside jaxpaged, and its file; links are not followed."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not any((ROOT / parent).is_symlink() for parent in file.relative_to(ROOT).parents):
                yield name.removeprefix("jaxpaged").removeprefix("."), file


MODULES = dict(_modules())


def _room(module: str) -> str:
    first = module.split(".")[0]
    return "top" if first in TOP else first if first in ROOMS else "engine"


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


def _inside(name: str, allowed: tuple[str, ...]) -> bool:
    return any(not part or name == part or name.startswith(part + ".") for part in allowed)


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    third, parts = ROOMS[_room(module)]
    parts += ALSO.get(module, ())
    for name in _imports(module):
        package, _, part = name.partition(".")
        if package == "jaxpaged":
            assert not part or _inside(part, parts), f"{module} must not import {name}"  # bare: for __version__
            assert _room(part) != "server" or _room(module) == "server" or module == "cli", \
                f"{module} imports {name}: only server/ and the command line may"
        else:
            assert package in third or package in sys.stdlib_module_names, f"{module} must not import {name}"
            assert package != "jax" or module not in NO_JAX, f"{module} must not import JAX"


def test_third_party_imports_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~;\[ ]", line)[0].lower().replace("-", "_") for line in project["dependencies"]}
    declared = declared - {"pyyaml", "orbax_checkpoint"} | {"yaml", "orbax"}
    declared |= {"starlette", "pydantic"}  # FastAPI is made of them and its users import them
    used = {name.split(".")[0] for module in MODULES for name in _imports(module)} - {"jaxpaged"}
    assert used - set(sys.stdlib_module_names) <= declared


def _loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after running `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("command", ["server", "plan", "convert", "compile", "models"])
def test_help_loads_neither_jax_nor_fastapi(command: str) -> None:
    """What makes `--help` quick."""
    loaded = _loaded_by(f"import runpy, sys\nsys.argv = ['jaxpaged.{command}', '--help']\n"
                        f"try:\n    runpy.run_module('jaxpaged.{command}', run_name='__main__')\n"
                        "except SystemExit as end:\n    assert not end.code\n"
                        "else:\n    raise AssertionError('--help did not exit')")
    assert not loaded & {"jax", "flax", "fastapi", "uvicorn", "transformers", "torch", "numpy"}


@pytest.mark.parametrize("module", ["jaxpaged", "jaxpaged.server.app", "jaxpaged.tokenizer", "jaxpaged.loading.gguf"])
def test_the_http_side_loads_no_jax(module: str) -> None:
    assert not _loaded_by(f"import {module}") & {"jax", "flax", "torch"}


def test_the_package_loads_nothing_else() -> None:
    assert not _loaded_by("import jaxpaged") & {"numpy", "transformers", "fastapi"}
