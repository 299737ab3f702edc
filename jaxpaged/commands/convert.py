"""`python -m jaxpaged.convert MODEL OUT`: save a model with Orbax, ready to load into any mesh of devices."""

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxpaged.commands.quiet_jax import import_jax
from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import Parser

_TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
                    "*.jinja", "vocab.json", "vocab.txt", "merges.txt", "generation_config.json")


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.convert") -> int:
    """Run the command.

    Returns:
        0, or 1 after an error, reported in one line.
    """
    parser = Parser(prog=prog, allow_abbrev=False,
                    description="Save a model's parameters with Orbax, beside its config and tokenizer. The directory "
                    "is a MODEL for every command; each device reads only its shard.")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL,
                        help="directory in Hugging Face layout, .gguf file, hub id, or the default model")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to create; it must be empty")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                        help="dtype to save in; auto: the checkpoint's (bfloat16 where it is quantized)")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub model")
    parser.add_argument("--download-dir", metavar="TEXT", help="directory for downloads (default: the user's cache)")
    arguments = parser.parse_args(argv)
    try:
        _convert(arguments)
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory; choose another one")
    import_jax()
    from jaxpaged.engine.planning import define, model_dtype
    from jaxpaged.execution.devices import select_device
    from jaxpaged.execution.sharding import Partition
    from jaxpaged.loading.checkpoint import open_model
    from jaxpaged.loading.host_memory import return_free_memory
    from jaxpaged.loading.hub import resolve_model
    from jaxpaged.loading.orbax import OrbaxCheckpoint, save
    from jaxpaged.loading.weights import load_params, shapes_of_parts
    from jaxpaged.models.registry import find_family

    source = resolve_model(arguments.model, arguments.revision, arguments.download_dir)
    checkpoint = open_model(source)
    if isinstance(checkpoint, OrbaxCheckpoint):
        raise ConfigError(f"{source} was already saved by Orbax")
    select_device("cpu")
    family = find_family(checkpoint.config)
    config = family.config_from_hf(checkpoint.config)
    dtype = model_dtype(arguments.dtype, config, "cuda")
    definition = define(family, dtype, config, Partition())
    rules = [part for rule in family.weights for part in rule.parts]
    shapes = shapes_of_parts(definition.stored, family.weights, config)
    params = load_params(shapes, rules, checkpoint, config=config, ignored=family.ignored, dtype=dtype,
                         keep_in_place=True, progress=True)
    return_free_memory()
    out.mkdir(parents=True, exist_ok=True)
    with _bar(out, definition.weight_bytes):
        save(out, params)
    _write_tokenizer(source, out)
    # Last, so that an interrupted conversion is not taken for a model.
    (out / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": dtype.name}, indent=2) + "\n")
    print(f"{out}: {definition.weight_bytes / 2**20:,.0f} MiB of {dtype.name} parameters; use it as --model {out}")


def _write_tokenizer(source: Path, out: Path) -> None:
    if source.is_dir():
        for file in {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)}:
            shutil.copyfile(file, out / file.name)
    else:
        from jaxpaged.text.tokenizer_files import load_tokenizer

        tokenizer = load_tokenizer(source)
        tokenizer.hf.save_pretrained(out)
        # The tokenizer's files name one id that ends a text; a .gguf file has more.
        ends = {"eos_token_id": sorted(tokenizer.eos_token_ids)}
        (out / "generation_config.json").write_text(json.dumps(ends) + "\n")


@contextmanager
def _bar(folder: Path, size: int) -> Iterator[None]:
    """A progress bar of the bytes in a folder; with compression there are fewer than `size`."""
    from tqdm import tqdm

    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            bar.update(min(_bytes_in(folder), size) - bar.n)

    with tqdm(total=size, unit="B", unit_scale=True, desc="Saving weights") as bar:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
            done.set()
            watcher.join()
            bar.update(size - bar.n)
        finally:
            done.set()
            watcher.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # Orbax renames finished files
            total += file.stat().st_size
    return total
