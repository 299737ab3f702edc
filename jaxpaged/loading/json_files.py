"""The JSON files of a model's directory; needed on the HTTP side too, so nothing here loads JAX."""

import json
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import CheckpointError

_MAX_JSON_BYTES = 1 << 26


def read_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of a model's directory; empty where there is none, as for a .gguf file.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    file = path / "generation_config.json"
    return read_json(file) if file.exists() else {}


def read_json(file: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, too large, or something else.
    """
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_JSON_BYTES} bytes")
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; a model directory needs it") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return found
