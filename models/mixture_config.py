"""Read what the families with mixtures of experts say about them in a checkpoint's config.json."""

from typing import Any

from jaxpaged.core.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.config import ExpertsSpec
from jaxpaged.models.hf_config import activation, flag, number, size
from jaxpaged.pallas_kernels.routing import RoutingRule

# Keys of `config_checks.NEUTRAL` that say how many experts there are; files of any family have the one or the other.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_spec(
    hf: dict[str, Any], dim: str, *, default_count: str = "num_experts", chosen: str = "num_experts_per_tok",
    normalized: bool | None = None, rule: dict[str, Any] | None = None, **fields: Any,
) -> ExpertsSpec:
    """The mixture of a layer.

    Args:
        dim: the key of the size of an expert.
        default_count: the one of `COUNTS` that the family's defaults have; another one, in a file, comes first.
        chosen: the key of how many experts a token is sent to.
        normalized: whether a token's weights are divided by their sum; None: `norm_topk_prob` says so.
        rule: other fields of `RoutingRule`; without them scores are the softmax over all experts.
        fields: others of `ExpertsSpec`.

    Raises:
        CheckpointError: a token is sent to more experts than there are, or groups do not fit.
        UnsupportedModelError: the file says that scores are others than the family's.
    """
    given = next((key for key in COUNTS if key != default_count and hf.get(key) is not None), default_count)
    count, top_k = size(hf, given), size(hf, chosen)
    if top_k > count:
        raise CheckpointError(f"config.json: {chosen} ({top_k}) must be at most the number of experts ({count}, "
                              f"{given})")
    if normalized is None:
        normalized = flag(hf, "norm_topk_prob")
    found = RoutingRule(top_k, normalized=normalized, **rule or {})
    scores = "sigmoid" if found.sigmoid else "softmax"
    if hf.get("scoring_func") not in (None, scores):
        raise UnsupportedModelError(f"config.json: scoring_func {hf['scoring_func']!r:.64} is not supported for this "
                                    f"family; it must be {scores!r}")
    in_group = count // found.groups
    if count % found.groups or found.best_groups > found.groups or in_group < 1 + found.by_two * (
            found.groups > 1) or top_k > found.best_groups * in_group:
        raise CheckpointError(f"config.json: n_group ({found.groups}) and topk_group ({found.best_groups}) do not fit "
                              f"{count} experts ({given}), {top_k} of which are chosen")
    return ExpertsSpec(size(hf, dim), count, found, activation(hf, "hidden_act"), **fields)


def corrected_experts(hf: dict[str, Any]) -> ExpertsSpec:
    """The mixture of DeepSeek-V3 and its kin: by sigmoids, with a bias on the choice, groups, and a shared part.

    Raises:
        CheckpointError: as `experts_spec`.
    """
    rule = {"sigmoid": True, "by_two": True, "groups": size(hf, "n_group", 1), "best_groups": size(hf, "topk_group", 1),
            "scale": number(hf, "routed_scaling_factor", 1.0)}
    return experts_spec(hf, "moe_intermediate_size", default_count="n_routed_experts", choice_bias=True, rule=rule,
                        shared_dim=whole(hf, "n_shared_experts") * size(hf, "moe_intermediate_size"))


def whole(hf: dict[str, Any], name: str) -> int:
    """A number of things of config.json, of which there may be none.

    Raises:
        CheckpointError: it is something else.
    """
    return 0 if hf.get(name) is None or (hf[name] == 0 and hf[name] is not False) else size(hf, name)


def sparse_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """Layers with experts: every `decoder_sparse_step`-th, but those in `mlp_only_layers`.

    Raises:
        CheckpointError: `mlp_only_layers` is not a list of numbers.
    """
    dense = hf["mlp_only_layers"] or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError("config.json: mlp_only_layers must be a list of numbers of layers")
    step = size(hf, "decoder_sparse_step")
    return tuple(layer for layer in range(size(hf, "num_hidden_layers"))
                 if layer not in dense and (layer + 1) % step == 0)
