"""The rotary rule of each layer, from the tables of a config.json.

There are two spellings: rope_theta and rope_scaling of older checkpoints, and rope_parameters, which holds both. A
table may also be nested: one for each type of layer.
"""

import math
from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import RopeConfig

# The numbers of each kind. Those of the other kinds change nothing, and older files have them.
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
_MAX_NUMBER = 1e30  # JSON's integers have no end
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim", "finetuned",
          *(name for names in _NUMBERS.values() for name in names)}


def rope_config(hf: dict[str, Any], layer_type: str = "full_attention") -> RopeConfig | None:
    """The rotary rule of the layers of one type; None: these are not rotated.

    As in transformers `rope_scaling` wins over `rope_parameters`, and what a table leaves out is next to it.

    Args:
        hf: config.json, with the family's defaults.
        layer_type: which of several nested tables.

    Raises:
        CheckpointError: a table is damaged, or the two contradict each other.
        UnsupportedModelError: a kind of scaling, or a key in a table, that is not supported.
    """
    table = _table(hf, layer_type)
    if table is None:
        return None
    kind = _kind(table)
    if kind not in _NUMBERS:
        raise UnsupportedModelError(f"config.json: rotary scaling {kind!r} is not supported; supported are "
                                    f"{', '.join(_NUMBERS)}")
    unknown = sorted(table.keys() - _KNOWN)
    if unknown:
        raise UnsupportedModelError(f"config.json: the rotary table has {unknown[0]}, which is not supported")
    if table.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {table['partial_rotary_factor']} is not "
                                    "supported")
    numbers = _with_defaults(hf, table, kind)
    return RopeConfig(_positive(numbers, "rope_theta"), kind, tuple((name, _number(numbers, name))
                                                                   for name in _NUMBERS[kind]))


def context_length(hf: dict[str, Any], given: int) -> int:
    """The longest text: `given`, or YaRN's factor times what the model was first made for, if that is longer."""
    table = _table(hf, "full_attention")
    if table is None or _kind(table) != "yarn":
        return given
    rope = rope_config(hf)
    assert rope is not None
    scaling = dict(rope.scaling)
    return max(given, int(scaling["factor"] * scaling["original_max_position_embeddings"]))


def merge_overrides(hf: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A config.json with --hf-overrides; a rotary table among them replaces the file's, in whatever spelling that is.

    The base frequency stays the file's unless the new table has one.
    """
    merged = hf | overrides
    if not overrides.keys() & {"rope_scaling", "rope_parameters"}:
        return merged
    for key in ("rope_scaling", "rope_parameters"):
        if key not in overrides:
            merged.pop(key, None)
    replaced = hf.get("rope_scaling") or hf.get("rope_parameters")
    if "rope_theta" not in merged and isinstance(replaced, dict) and "rope_theta" in replaced:
        merged["rope_theta"] = replaced["rope_theta"]
    return merged


def _table(hf: dict[str, Any], layer_type: str) -> dict[str, Any] | None:
    scaling, parameters = (_object(hf, key) for key in ("rope_scaling", "rope_parameters"))
    for name in scaling and ("rope_theta", "partial_rotary_factor"):
        lost = parameters.get(name)
        if lost is not None and name not in scaling and not _nested(scaling) and lost != hf.get(name):
            raise CheckpointError(f"config.json: rope_scaling takes the place of rope_parameters, whose {name} {lost} "
                                  f"it does not have; add {name} to rope_scaling")
    table = scaling or parameters
    if not _nested(table):
        return table
    if layer_type not in table:
        raise CheckpointError(f"config.json: the rotary tables by layer type lack one for {layer_type}")
    found = table[layer_type]
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"config.json: the rotary table of {layer_type} must be an object or null")
    return found


def _object(hf: dict[str, Any], key: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} must be an object")
    return value


def _nested(table: dict[str, Any]) -> bool:
    return any(name.endswith("_attention") or isinstance(value, dict) for name, value in table.items())


def _kind(table: dict[str, Any]) -> str:
    return str(table.get("rope_type") or table.get("type") or "default")


def _with_defaults(hf: dict[str, Any], table: dict[str, Any], kind: str) -> dict[str, Any]:
    """The table with what is left out filled in, as transformers does."""
    given = {name: value for name, value in table.items() if value is not None}
    if "rope_theta" not in given:
        given["rope_theta"] = 10000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    if kind not in ("llama3", "yarn"):
        return given
    # Outside the table it comes first (Phi-3).
    outside = hf.get("original_max_position_embeddings")
    original = given.get("original_max_position_embeddings") if outside is None else outside
    given["original_max_position_embeddings"] = hf.get("max_position_embeddings") if original is None else original
    return given if kind == "llama3" else _yarn_numbers(hf, given)


def _yarn_numbers(hf: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What follows from the others (Peng et al., 2023)."""
    if "factor" not in given:
        given["factor"] = _positive(hf, "max_position_embeddings") / _positive(given,
                                                                               "original_max_position_embeddings")
    factor = _positive(given, "factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    part, whole = (_number(given, name) if given.get(name) else 0 for name in ("mscale", "mscale_all_dim"))
    attention_factor = magnitude(part) / magnitude(whole) if part and whole else magnitude(1)
    return {"attention_factor": attention_factor, "truncate": True, **given,
            "beta_fast": given.get("beta_fast") or 32, "beta_slow": given.get("beta_slow") or 1}


def _number(numbers: dict[str, Any], name: str) -> float:
    value = numbers.get(name)
    if not isinstance(value, (int, float)) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        raise CheckpointError(f"config.json: {name} of the rotary scaling must be a number, not {value!r}")
    return float(value)


def _positive(numbers: dict[str, Any], name: str) -> float:
    value = numbers.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MAX_NUMBER:
        what = name if name == "rope_theta" else f"{name} of the rotary scaling"
        raise CheckpointError(f"config.json: {what} must be a positive number, not {value!r}")
    return float(value)
