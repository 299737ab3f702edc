"""Read what the families with mixtures of experts say about them in a checkpoint's config.json."""

from typing import Any

from jaxpaged.core.errors import CheckpointError
from jaxpaged.models.config import ExpertsSpec
from jaxpaged.models.hf_config import activation, flag, size
from jaxpaged.pallas_kernels.routing import RoutingRule

# Keys of `config_checks.NEUTRAL` that say how many experts there are; files of any family have the one or the other.
COUNTS = ("num_experts", "num_local_experts")


def experts_spec(
    hf: dict[str, Any], dim: str, *, default_count: str = "num_experts", normalized: bool | None = None, **fields: Any,
) -> ExpertsSpec:
    """The mixture of a layer whose scores are the softmax over all experts.

    Args:
        dim: the key of the size of an expert.
        default_count: the one of `COUNTS` that the family's defaults have; the other one, in a file, comes first.
        normalized: whether a token's weights are divided by their sum; None: `norm_topk_prob` says so.
        fields: others of `ExpertsSpec`.

    Raises:
        CheckpointError: a token is sent to more experts than there are.
    """
    given = next((key for key in COUNTS if key != default_count and hf.get(key) is not None), default_count)
    count, top_k = size(hf, given), size(hf, "num_experts_per_tok")
    if top_k > count:
        raise CheckpointError(f"config.json: num_experts_per_tok ({top_k}) must be at most the number of experts "
                              f"({count}, {given})")
    if normalized is None:
        normalized = flag(hf, "norm_topk_prob")
    return ExpertsSpec(size(hf, dim), count, RoutingRule(top_k, normalized=normalized), activation(hf, "hidden_act"),
                       **fields)


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
