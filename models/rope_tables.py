"""The rotary rule of each layer, from the tables of a config.json.

There are two spellings: rope_theta and rope_scaling of older checkpoints, and rope_parameters, which holds both. A
table may also be nested: one for each type of layer.
"""

import math
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import RopeConfig
from jaxpaged.models.text_part import text_config

# The numbers of each kind. Those of the other kinds change nothing, and older files have them.
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("original_max_position_embeddings", "attention_factor"),
}
_FACTORS = "short_factor", "long_factor"
_MAX_NUMBER = 1e30  # JSON's integers have no end
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim", "finetuned",
          *_FACTORS, *(name for names in _NUMBERS.values() for name in names)}


def rope_config(
    hf: dict[str, Any], layer_type: str = "full_attention", head_dim: int | None = None, *, partial: bool = False
) -> RopeConfig | None:
    """The rotary rule of the layers of one type; None: these are not rotated.

    As in transformers `rope_scaling` wins over `rope_parameters`, and what a table leaves out is next to it.

    Args:
        hf: config.json, with the family's defaults.
        layer_type: which of several nested tables.
        head_dim: H; left out where only the numbers matter.
        partial: the family can rotate a part of each head.

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
    dims = None
    if partial and head_dim is not None:
        dims = _rotated(hf, table, head_dim)
    elif not partial and table.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {table['partial_rotary_factor']} is not "
                                    "supported")
    numbers = _with_defaults(hf, table, kind)
    found = RopeConfig(_positive(numbers, "rope_theta"), kind,
                       tuple((name, _number(numbers, name)) for name in _NUMBERS[kind]), dims)
    if kind == "dynamic":
        if (dims or head_dim or 4) < 4:
            raise CheckpointError("config.json: the rotary scaling dynamic needs at least 4 rotated numbers per head")
        return replace(found, length=int(_positive(hf, "max_position_embeddings")))
    if kind != "longrope":
        return found
    short, long = (_factors(table, name, dims or head_dim) for name in _FACTORS)
    return replace(found, short_factors=short, long_factors=long, length=int(_positive(hf, "max_position_embeddings")))


def _rotated(hf: dict[str, Any], table: dict[str, Any], head_dim: int) -> int | None:
    """How many of a head's numbers are rotated; None: all."""
    share = next((item["partial_rotary_factor"] for item in (table, hf)
                  if item.get("partial_rotary_factor") is not None), 1)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor must be a number from 0 to 1, not {share!r:.64}")
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        raise CheckpointError(f"config.json: partial_rotary_factor {share} rotates {dims} numbers of each head, which "
                              "must be an even number")
    return None if dims == head_dim else dims


def _factors(table: dict[str, Any], name: str, dims: int | None) -> tuple[float, ...]:
    """longrope's divisors, one for each frequency."""
    found = table.get(name)
    if not isinstance(found, list) or (dims is not None and len(found) != dims // 2):
        count = "" if dims is None else f" of {dims // 2}"
        raise CheckpointError(f"config.json: {name} of the rotary scaling must be a list{count} numbers")
    return tuple(_positive({name: item}, name) for item in found)


def by_layer_type(hf: dict[str, Any], local_theta: Any) -> dict[str, Any]:
    """With a table for layers that have a window, and one for the others: what config.json says is for these alone.

    Args:
        local_theta: the base frequency of layers with a window, which are not scaled.
    """
    scaling, parameters = (_object(hf, key) for key in ("rope_scaling", "rope_parameters"))
    nested = scaling if _nested(scaling) else parameters if _nested(parameters) else {}
    if parameters and not _nested(parameters):
        raise CheckpointError("config.json: rope_parameters of this family must have a table for full_attention and "
                              "one for sliding_attention; give what is for full_attention alone as rope_scaling")
    flat = {} if _nested(scaling) else scaling
    full, local = (nested.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    if isinstance(full, dict) and isinstance(local, dict):
        full, local = full | flat, {"rope_theta": local_theta} | local
    return hf | {"rope_scaling": None, "rope_parameters": {"full_attention": full, "sliding_attention": local}}


def renamed_kinds(hf: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """With other names for kinds of scaling."""
    tables = {key: _object(hf, key) for key in ("rope_scaling", "rope_parameters") if hf.get(key)}
    return hf | {key: table | {"rope_type": names.get(_kind(table), _kind(table))} for key, table in tables.items()}


def context_length(hf: dict[str, Any], given: int) -> int:
    """The longest text: `given`, or YaRN's factor times what the model was first made for, if that is longer."""
    table = _table(hf, "full_attention")
    if table is None or _kind(table) != "yarn":
        return given
    rope = rope_config(hf, partial=True)
    assert rope is not None
    scaling = dict(rope.scaling)
    return max(given, int(scaling["factor"] * scaling["original_max_position_embeddings"]))


def stretched_length(hf: dict[str, Any], given: int) -> int | None:
    """The longest text that can be asked for, if longer than `given`: dynamic scaling is for those beyond alone."""
    table = _table(hf, "full_attention")
    if table is None or _kind(table) != "dynamic":
        return None
    return max(given, int(given * _positive(_with_defaults(hf, table, "dynamic"), "factor")))


def merge_overrides(hf: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A config.json with --hf-overrides; a rotary table among them replaces the file's, in whatever spelling that is.

    Of a multimodal model it is that of its text model.
    The base frequency stays the file's unless the new table has one.
    """
    hf, nested = text_config(hf), overrides.get("text_config")
    if isinstance(nested, dict):
        overrides = {key: value for key, value in overrides.items() if key != "text_config"} | nested
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
    if kind == "dynamic":
        return given | {"max_position_embeddings": hf.get("max_position_embeddings")}
    if kind not in ("llama3", "yarn", "longrope"):
        return given
    # Outside the table it comes first (Phi-3).
    outside = hf.get("original_max_position_embeddings")
    original = given.get("original_max_position_embeddings") if outside is None else outside
    given["original_max_position_embeddings"] = hf.get("max_position_embeddings") if original is None else original
    if kind == "llama3":
        return given
    if "factor" not in given:
        given["factor"] = _positive(hf, "max_position_embeddings") / _positive(given,
                                                                               "original_max_position_embeddings")
    if kind == "longrope":  # Ding et al., 2024
        factor, context = _positive(given, "factor"), _positive(given, "original_max_position_embeddings")
        stretched = min(factor, context) > 1
        return {"attention_factor": math.sqrt(1 + math.log(factor) / math.log(context)) if stretched else 1.0, **given}
    return _yarn_numbers(given)


def _yarn_numbers(given: dict[str, Any]) -> dict[str, Any]:
    """What follows from the others (Peng et al., 2023)."""
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
