"""One row per parameter: the checkpoint's tensors, our parameter path, and how these become that.

A row serves all layers: `{i}` in names and path is the layer number. It serves all experts of a layer, too: tensors
with `{e}` in their names are stacked along a new first axis. Transforms are named so that a table reads like a list of
facts; each takes and returns a numpy array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpaged.models.config import AttentionSpec, ExpertsSpec, LatentSpec, ModelConfig
from jaxpaged.models.quantization import BLOCK, LEAVES, PANEL, WEIGHTS, PackedType
from jaxpaged.models.rotary import head_order

Transform = Callable[[np.ndarray], np.ndarray]
# Names of a parameter's axes that devices may share out; None, or left out: whole. Several names: a fused axis, along
# which parameters with these axes lie one after the other.
Axes = tuple[str | tuple[str, ...] | None, ...]
Bounds = Callable[[ModelConfig, int], tuple[slice, ...]]

# The size of a logical axis in a layer, where it is a part of a fused axis.
AXIS_SIZES: dict[str, Callable[[ModelConfig, int], int]] = {
    "heads": lambda config, layer: _size(config, layer, "num_heads") * _size(config, layer, "head_dim"),
    "kv_heads": lambda config, layer: _size(config, layer, "num_kv_heads") * _size(config, layer, "head_dim"),
    "state_keys": lambda config, layer: _size(config, layer, "keys"),
    "state_values": lambda config, layer: _size(config, layer, "values"),
    "state_heads": lambda config, layer: _size(config, layer, "value_heads"),
    "mlp": lambda config, layer: config.layers[layer].mlp.dim,
    "shared_mlp": lambda config, layer: getattr(config.layers[layer].mlp, "shared_dim", 0),
}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor, the only one that is read.

    Attributes:
        bounds: of a config and a layer, from where to where on each axis of the tensor; axes left out are whole.
        heads_axis: the axis with the numbers of heads of queries or keys. Their rotary pairs may lie otherwise in the
            checkpoint than here: see `head_order`.
        other: another name that a checkpoint may have it by.
        rows: of a layer's mixer, which rows of the tensor it takes, in which order; None: what `bounds` says.
    """

    tensor: str
    bounds: Bounds
    heads_axis: int | None = None
    rows: Callable[[Any], np.ndarray] | None = None
    other: str | None = None

    def order(self, config: ModelConfig, layer: int) -> tuple[int, ...] | None:
        """Where each number of a head lies in the checkpoint; None: in the same place."""
        spec = config.layers[layer].mixer
        if self.heads_axis is None or not isinstance(spec, AttentionSpec):
            return None
        return head_order(spec.head_dim, spec.rope)


Source = str | TensorSlice


@dataclass(frozen=True, slots=True)
class WeightRule:
    """`tensor` in the checkpoint (Hugging Face spelling) becomes the parameter at `path` after `transform`.

    Several tensors, each transformed, become one parameter along its fused axis, in the order of the axis' names. A
    single tensor that a checkpoint has fused already needs no more than the names.

    `axes` are the parameter's, after the transform: names of `AXIS_SIZES`, "vocab", or "experts".

    Of several rules with one path the first whose tensors a checkpoint has is taken; they have the same axes.

    `packed`: the parameter is one of the arrays of `PackedType.shapes`.

    `wide`: the parameter is float32 in a model of any dtype.
    """

    tensor: Source | tuple[Source, ...]
    path: str
    transform: Transform
    axes: Axes = ()
    transform_by_config: Callable[[ModelConfig], Transform] | None = None
    packed: str | None = None
    wide: bool = False

    def transform_of(self, config: ModelConfig) -> Transform:
        """The transform for a model of this config."""
        return self.transform_by_config(config) if self.transform_by_config else self.transform

    @property
    def sources(self) -> tuple[TensorSlice, ...]:
        """The tensors, each as a slice."""
        tensors = self.tensor if isinstance(self.tensor, tuple) else (self.tensor,)
        return tuple(TensorSlice(item, whole) if isinstance(item, str) else item for item in tensors)

    @property
    def parts(self) -> tuple["WeightRule", ...]:
        """A rule for each tensor, as a parameter of its own that has a number after its path."""
        if not isinstance(self.tensor, tuple):
            return (self,)
        return tuple(replace(self, tensor=tensor, path=f"{self.path}.{index}",
                             axes=tuple(name[index] if isinstance(name, tuple) else name for name in self.axes))
                     for index, tensor in enumerate(self.tensor))

    @property
    def module(self) -> str:
        """The path of the module whose parameter it is."""
        return self.path.rpartition(".")[0]

    @property
    def is_product(self) -> bool:
        """Whether the parameter is the weights of a product, those of experts apart."""
        return self.path.rpartition(".")[2] in WEIGHTS and not self.is_of_experts

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter is the weights of all experts of a layer."""
        return self.axes[:1] == ("experts",)

    @property
    def fused_axis(self) -> int | None:
        """The number of the parameter's fused axis, if there is one."""
        return next((axis for axis, name in enumerate(self.axes) if isinstance(name, tuple)), None)

    def fused_sizes(self, config: ModelConfig, layer: int) -> tuple[int, ...]:
        """The size of each part of the fused axis."""
        names = () if self.fused_axis is None else self.axes[self.fused_axis]
        unit = PANEL if self.packed else 1  # of a packed parameter it is that of panels
        return tuple(AXIS_SIZES[name](config, layer) // unit for name in names or ())


def with_packed(rules: Sequence[WeightRule]) -> tuple[WeightRule, ...]:
    """The rules, and those of the arrays in which the weights of products may lie packed."""
    return (*rules, *(_packed_rule(rule, leaf) for rule in rules if rule.is_product for leaf in LEAVES))


def _packed_rule(rule: WeightRule, leaf: str) -> WeightRule:
    if leaf == "order":  # which all tensors of a product share
        return replace(rule, path=f"{rule.path}.{leaf}", tensor=rule.sources[0], axes=(), packed=leaf)
    return replace(rule, path=f"{rule.path}.{leaf}", axes=_packed_axes(rule), packed=leaf)


def _packed_axes(rule: WeightRule) -> Axes:
    """Of weights [in, out], or of a table [out, in]: the panels of outputs, then the inputs."""
    first, second = (*rule.axes, None, None)[:2]
    return (second, first) if rule.path.endswith(".kernel") else (first, second)


def packable(
    rules: Sequence[WeightRule], config: ModelConfig, devices: int, kv_devices: int
) -> Callable[[str, PackedType], PackedType | None]:
    """Says of a module's path, and its weights' type, in which type each device's shard is whole groups and panels.

    Args:
        devices: that the model is shared by, and among which KV heads are divided over `kv_devices`.
    """
    table = {numbered(rule.module, layer): (rule, layer) for rule in rules if rule.is_product
             for layer in (range(config.num_layers) if "{i}" in rule.path else (0,))}
    sizes = AXIS_SIZES | {"vocab": lambda config, layer: config.vocab_size}

    def whole_parts(names: str | tuple[str, ...] | None, layer: int, unit: int) -> bool:
        return all(sizes[name](config, layer) % (unit * (kv_devices if name == "kv_heads" else devices)) == 0
                   for name in ((names,) if isinstance(names, str) else names or ()))

    def check(path: str, kind: PackedType) -> PackedType | None:
        if path not in table:  # of experts
            return None
        rule, layer = table[path]
        out, depth = _packed_axes(rule)
        plain = all(item.rows is None and item.bounds is whole for item in rule.sources)
        if not (plain and config.model_dim % BLOCK == 0
                and rule.transform is (as_is if rule.path.endswith(".table") else transposed)
                and rule.transform_by_config is None and whole_parts(out, layer, PANEL)
                and whole_parts(depth, layer, BLOCK)):
            return None
        if devices == 1 or depth is None:
            return kind if kind.group else kind.split(
                sizes[depth](config, layer) if isinstance(depth, str) else config.model_dim)
        if isinstance(config.layers[layer].mixer, LatentSpec):
            return None  # whose inputs of `o` are not those of `AXIS_SIZES`
        assert isinstance(depth, str), depth
        # Where an order mixes the inputs of several devices, none has whole groups.
        return None if kind.order else kind.split(sizes[depth](config, layer) // devices)

    return check


def products(rules: Sequence[WeightRule], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The modules that multiply with weights, by path, and the tensors of a checkpoint that these are made from.

    Those of experts, each a tensor of its own, are made from the tensors of all of the layer: one kernel reads them.
    """
    found = {numbered(rule.module, layer): tuple(numbered(item.tensor, layer) for item in rule.sources)
             for rule in rules if rule.is_product and not (config.tie_embeddings and rule.module == "head")
             for layer in (range(config.num_layers) if "{i}" in rule.path else (0,))}
    of_experts = [rule for rule in rules if rule.is_of_experts and "{e}" in rule.sources[0].tensor]
    for layer, spec in enumerate(config.layers):
        count = spec.mlp.count if isinstance(spec.mlp, ExpertsSpec) else 0
        tensors = tuple(numbered(item.tensor, layer, expert) for rule in of_experts for item in rule.sources
                        for expert in range(count))
        found |= {numbered(rule.module, layer): tensors for rule in of_experts if count}
    return found


def tensor_of(rules: Sequence[WeightRule], path: str) -> str:
    """The tensor that one parameter is made from; empty without a rule."""
    return next((source.tensor for rule in rules if rule.path == path for source in rule.sources), "")


def numbered(template: str, layer: int, expert: int = 0) -> str:
    """A tensor's name or a parameter's path, with the numbers of its layer and expert."""
    return template.replace("{i}", str(layer)).replace("{e}", str(expert))


def whole(config: ModelConfig, layer: int) -> tuple[slice, ...]:
    """All of a tensor."""
    return ()


def fused_part(tensor: str, names: tuple[str, ...], index: int, heads_axis: int | None = None) -> TensorSlice:
    """One of the parts, of these logical axes' sizes, that a tensor has one after the other along its first axis."""
    def bounds(config: ModelConfig, layer: int) -> tuple[slice, ...]:
        sizes = [AXIS_SIZES[name](config, layer) for name in names]
        return (slice(sum(sizes[:index]), sum(sizes[: index + 1])),)

    return TensorSlice(tensor, bounds, heads_axis)


def fused_qkv(tensor: str) -> tuple[TensorSlice, ...]:
    """Queries, keys and values of a tensor that has them one after the other."""
    names = "heads", "kv_heads", "kv_heads"
    return tuple(fused_part(tensor, names, index, None if index == 2 else 0) for index in range(3))


def grouped_qkv(tensor: str) -> tuple[TensorSlice, ...]:
    """Queries, keys and values of a tensor that has, for each head of keys, its queries, the key and the value."""
    def rows(part: int) -> Callable[[AttentionSpec], np.ndarray]:
        def of(spec: AttentionSpec) -> np.ndarray:
            share = spec.num_heads // spec.num_kv_heads
            all_rows = np.arange((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
            groups = all_rows.reshape(spec.num_kv_heads, share + 2, spec.head_dim)
            return groups[:, (slice(share), slice(share, share + 1), slice(share + 1, share + 2))[part]].reshape(-1)

        return of

    return tuple(TensorSlice(tensor, whole, None if part == 2 else 0, rows(part)) for part in range(3))


def with_rules(rules: Sequence[WeightRule], *more: WeightRule) -> tuple[WeightRule, ...]:
    """A table in which `more` take the place of rules of the same path."""
    return tuple({rule.path: rule for rule in (*rules, *more)}.values())


def norms(prefix: str = "model.layers.{i}.", **tensors: str) -> tuple[WeightRule, ...]:
    """Rules for norms of a layer, by what a layer's module calls them, and where the checkpoint has them."""
    return tuple(WeightRule(f"{prefix}{tensor}.weight", f"layers.{{i}}.{name}.scale", as_is)
                 for name, tensor in tensors.items())


def layer_norms(prefix: str, **tensors: str) -> tuple[WeightRule, ...]:
    """As `norms`, with biases."""
    return (*norms(prefix, **tensors), *(WeightRule(f"{prefix}{tensor}.bias", f"layers.{{i}}.{name}.bias", as_is)
                                         for name, tensor in tensors.items()))


def dense(
    tensor: str, path: str, transform: Transform, axes: Axes, *, whole_bias: bool = False,
    part: Callable[[str], tuple[TensorSlice, ...]] | None = None,
) -> tuple[WeightRule, ...]:
    """Rules for the weights and the bias of a product.

    Args:
        axes: of the weights, [in, out].
        whole_bias: each device adds all of it, after the sum over devices.
        part: what splits a fused tensor.
    """
    def source(kind: str) -> Source | tuple[Source, ...]:
        return part(f"{tensor}.{kind}") if part else f"{tensor}.{kind}"

    return (WeightRule(source("weight"), f"{path}.kernel", transform, axes),
            WeightRule(source("bias"), f"{path}.bias", as_is, () if whole_bias else axes[1:]))


_EXPERT = "layers.{i}.mlp.expert"
_EXPERTS_GATE_UP: Axes = ("experts", None, ("mlp", "mlp"))
_EXPERTS_DOWN: Axes = ("experts", "mlp", None)


def experts(prefix: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Rules for the experts of a layer, each a tensor of its own.

    Args:
        gate, up, down: what their weights [out, in] are called.
    """
    names = [f"{prefix}.experts.{{e}}.{name}.weight" for name in (gate, up, down)]
    return (WeightRule((names[0], names[1]), f"{_EXPERT}_gate_up.kernel", transposed, _EXPERTS_GATE_UP),
            WeightRule(names[2], f"{_EXPERT}_down.kernel", transposed, _EXPERTS_DOWN))


def router(tensor: str) -> WeightRule:
    """Rule for the weights [E, D] of a router's product."""
    return WeightRule(tensor, "layers.{i}.mlp.router.kernel", transposed)


def choice_bias(tensor: str) -> WeightRule:
    """Rule for a bias on the choice of experts, of any shape with E numbers: what 16 bits round away is a choice."""
    return WeightRule(tensor, "layers.{i}.mlp.choice_bias", flat, wide=True)


def shared_mlp(prefix: str) -> tuple[WeightRule, ...]:
    """Rules for a gated MLP beside the experts."""
    path, gate_up = "layers.{i}.mlp.shared", (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    return (WeightRule(gate_up, f"{path}.gate_up.kernel", transposed, (None, ("shared_mlp", "shared_mlp"))),
            WeightRule(f"{prefix}.down_proj.weight", f"{path}.down.kernel", transposed, ("shared_mlp", None)))


def fused_experts(
    prefix: str, gate_up: str = "experts.gate_up_proj", down: str = "experts.down_proj"
) -> tuple[WeightRule, ...]:
    """Rules for experts in two tensors, [E, 2F, D] with gate and up one after the other, and [E, D, F]."""
    return (WeightRule(f"{prefix}.{gate_up}", f"{_EXPERT}_gate_up.kernel", each_transposed, _EXPERTS_GATE_UP),
            WeightRule(f"{prefix}.{down}", f"{_EXPERT}_down.kernel", each_transposed, _EXPERTS_DOWN))


def alternating_experts(prefix: str) -> tuple[WeightRule, ...]:
    """Rules for experts in two tensors [E, D, 2F], in which gate and up alternate, and [E, F, D], and their biases."""
    return (WeightRule(f"{prefix}.gate_up_proj", f"{_EXPERT}_gate_up.kernel", halves, _EXPERTS_GATE_UP),
            WeightRule(f"{prefix}.gate_up_proj_bias", f"{_EXPERT}_gate_up.bias", halves, _EXPERTS_GATE_UP[::2]),
            WeightRule(f"{prefix}.down_proj", f"{_EXPERT}_down.kernel", as_is, _EXPERTS_DOWN),
            WeightRule(f"{prefix}.down_proj_bias", f"{_EXPERT}_down.bias", as_is, _EXPERTS_DOWN[::2]))


def rotated(tensor: str, heads_axis: int = 0) -> TensorSlice:
    """All of a tensor of queries or keys: see `TensorSlice.heads_axis`."""
    return TensorSlice(tensor, whole, heads_axis)


def flat(tensor: np.ndarray) -> np.ndarray:
    """All numbers along one axis."""
    return tensor.reshape(-1)


def _size(config: ModelConfig, layer: int, name: str) -> int:
    """A size of a layer's mixer; 0 where it is of another kind."""
    return int(getattr(config.layers[layer].mixer, name, 0))


def as_is(tensor: np.ndarray) -> np.ndarray:
    """Norm scales, biases, and the embedding [V, D]."""
    return tensor


def transposed(tensor: np.ndarray) -> np.ndarray:
    """A linear layer: stored [out, in], used [in, out]."""
    return tensor.T


def each_transposed(tensor: np.ndarray) -> np.ndarray:
    """Linear layers of experts: stored [E, out, in], used [E, in, out]."""
    return tensor.swapaxes(1, 2)


def halves(tensor: np.ndarray) -> np.ndarray:
    """Numbers that alternate along the last axis: the even ones, then the odd ones."""
    return np.concatenate([tensor[..., ::2], tensor[..., 1::2]], axis=-1)


def unit_rows(tensor: np.ndarray) -> np.ndarray:
    """An output head [V, D] whose rows are divided by their length, transposed."""
    rows = np.asarray(tensor, np.float32)
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-7)).T
