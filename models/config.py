"""A model's shape, frozen: what each layer is and what it keeps, made from the checkpoint's config.json.

Axis letters as in the array comments: D model, N query heads, K kv heads, H head dim, F mlp, V vocab, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpaged.core.kv_groups import KVLayout, make_layout, with_states
from jaxpaged.models.quantization import DENSE, QuantScheme
from jaxpaged.pallas_kernels.routing import RoutingRule

NormPlacement = Literal["before", "after", "both", "after_residual", "parallel", "parallel_separate"]
# Over the numbers of each head, with a scale [H] for all or one [N, H] for each; or over all heads' together, [N * H].
QKNorm = Literal["head", "each head", "all heads"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency `theta`, and the scaling of long-context checkpoints.

    Attributes:
        scaling: the checkpoint's own table of numbers, kept as sorted pairs so that the config stays hashable.
        dims: R, an even number: only the first R of a head's H numbers are rotated; None: all.
        neighbors: in the checkpoint neighboring numbers form a pair, not those of the first and second half of R.
        short_factors, long_factors: longrope's divisors of each frequency, for texts within the original context and
            for longer ones.
        length: of the longest text that is served, where the frequencies depend on it; else 0.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    dims: int | None = None
    neighbors: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    length: int = 0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm, computed in float32.

    Attributes:
        eps: added to the mean square.
        mean: the mean is subtracted first (LayerNorm); otherwise it is a root mean square norm.
        plus_one: the weight is 1 + the stored scale (Gemma).
        bias: a bias is added.
    """

    eps: float = 1e-5
    mean: bool = False
    plus_one: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over paged keys and values.

    Attributes:
        rope: rotary rule; None: queries and keys are not rotated.
        bias, output_bias: of the products before and after attention.
        qk_norm: norm of queries and keys before they are rotated: see `QKNorm`.
        query_growth: (b, n): queries are multiplied by 1 + b * ln(1 + floor(position / n)).
        scale, window, softcap: see `AttentionRule`; scale None is H ** -0.5.
        alibi, alibi_scale: a bias that grows with distance (Press et al., 2022), and a factor on its slopes.
        sinks: a learned logit per head that takes weight and gives no value (gpt-oss).
        gated: the result is multiplied by the sigmoid of a product with the token, number by number.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: QKNorm = "head"
    query_growth: tuple[float, float] | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    alibi_scale: float = 1.0
    sinks: bool = False
    gated: bool = False

    def of_layer(self, rope: RopeConfig | None, window: int | None) -> "AttentionSpec":
        """With a layer's rotary rule and window."""
        return replace(self, rope=rope, window=window)

    def part(self, devices: int, kv_devices: int) -> "AttentionSpec":
        """With the heads of each of `devices` devices, over `kv_devices` of which KV heads are divided."""
        return replace(self, num_heads=self.num_heads // devices, num_kv_heads=self.num_kv_heads // kv_devices)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head for which there are rotary angles."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): pages hold one latent for the keys and values of all heads.

    Attributes:
        latent_dim: L, the numbers of a token that all heads' keys and values are products of.
        rotary_dim: O, the rotated numbers of a query's head; a token has as many, which all heads share.
        key_dim, value_dim: C and V, the numbers of a head's query that are not rotated, and of its value.
        query_dim: R, where queries are products of as many numbers; None: of the token.
        rope: rotary rule.
        bias: of the products that make the latent, the numbers that queries are made of, and the result.
        norm: of latents, and of the numbers that queries are made of.
        scale: factor on scores.
    """

    num_heads: int
    latent_dim: int
    rotary_dim: int
    key_dim: int
    value_dim: int
    query_dim: int | None
    scale: float
    rope: RopeConfig | None = RopeConfig()
    bias: bool = False
    norm: NormSpec = NormSpec(1e-6)

    def of_layer(self, rope: RopeConfig | None, window: int | None) -> "LatentSpec":
        """With a layer's rotary rule; there are no windows."""
        assert window is None, window
        return replace(self, rope=rope)

    def part(self, devices: int, kv_devices: int) -> "LatentSpec":
        """With the heads of each of `devices` devices; all of them hold all latents."""
        return replace(self, num_heads=self.num_heads // devices)

    @property
    def num_kv_heads(self) -> int:
        """One key, which all heads share."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of a token in a page, and of a query that is compared with them."""
        return self.latent_dim + self.rotary_dim

    @property
    def window(self) -> None:
        """All tokens are seen."""
        return None


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net (Yang et al., 2024): each value head has a state, a matrix [key_dim, value_dim].

    Attributes:
        key_heads: heads of queries and keys; each serves value_heads // key_heads heads of values.
        conv_width: tokens that the causal convolution before it sees.
        eps: of the norm after it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    eps: float = 1e-6

    def part(self, devices: int, kv_devices: int) -> "DeltaSpec":
        """With the heads of each of `devices` devices."""
        return replace(self, key_heads=self.key_heads // devices, value_heads=self.value_heads // devices)

    @property
    def keys(self) -> int:
        """Numbers of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state_size(self) -> int:
        """Numbers of the state of a sequence: the inputs that the convolution still sees, then the matrices."""
        return (self.conv_width - 1) * self.channels + self.values * self.key_dim


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """A dense MLP.

    Attributes:
        dim: F.
        activation: a key of `mlp.ACTIVATIONS`.
        gated: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
    """

    dim: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def padded(self, up: Callable[[int], int]) -> "MLPSpec":
        """With what devices share out rounded up."""
        return replace(self, dim=up(self.dim))


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts, each a gated MLP; the router sends each token to some of them.

    Attributes:
        dim: F of each expert.
        count: E.
        activation: a key of `mlp.ACTIVATIONS`.
        choice_bias: a learned bias on the choice of experts, not on their weights (DeepSeek-V3).
        shared_dim: F of a gated MLP that every token goes through besides; 0: none.
        shared_gate: what that MLP adds is multiplied by the sigmoid of a product with the token.
        bias: of the router's and the experts' products.
        clamp: (limit, growth): the gate, bounded from above, is multiplied by the sigmoid of itself times growth, and
            with the bounded other part plus 1, in place of an activation (gpt-oss).
    """

    dim: int
    count: int
    routing: RoutingRule
    activation: str = "silu"
    choice_bias: bool = False
    shared_dim: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: tuple[float, float] | None = None

    def padded(self, up: Callable[[int], int]) -> "ExpertsSpec":
        """With what devices share out rounded up."""
        return replace(self, dim=up(self.dim), shared_dim=up(self.shared_dim))


# What a layer may consist of; each kind has a module of its own.
TokenSpec = AttentionSpec | LatentSpec
MixerSpec = TokenSpec | DeltaSpec
AnyMLPSpec = MLPSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, which moves information between tokens, then an MLP, both added to the residual.

    Attributes:
        norms: where they are: before each of the two, after each (before it is added), both; "after_residual", of the
            sum, after each is added, as in the first Transformer; or "parallel": mixer and MLP read the same normed
            input ("parallel_separate": each normed by its own), and are added together.
        residual_scale: factor on what mixer and MLP add.
    """

    mixer: MixerSpec
    mlp: AnyMLPSpec
    norm: NormSpec = NormSpec()
    norms: NormPlacement = "before"
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: embedding, layers, norm, head.

    Attributes:
        norm: the norm before the head, if there is one.
        max_stretched_len: the longest context that can be asked for, where it is longer than `max_model_len`.
        head_bias: of the product that gives the logits.
        learned_positions: rows of a table of position embeddings that is added to the token's; 0: none.
        position_offset: the row of the first position.
        embedding_dim: of embeddings, where these are projected to D, and what the head reads is projected back.
        normalized_head: each row of the head is divided by its length when it is loaded.
        embedding_scale: factor on embeddings, rounded to the dtype of the weights.
        logit_scale, logit_softcap: logits times the one, then bounded by c * tanh(x / c) with the other.
        eos_token_ids: ids that end a text.
        checkpoint_dtype: of the checkpoint's weights.
        quant: how the weights lie in memory.
    """

    architecture: str
    model_dim: int
    vocab_size: int
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None = NormSpec()
    max_stretched_len: int | None = None
    tie_embeddings: bool = False
    head_bias: bool = False
    learned_positions: int = 0
    position_offset: int = 0
    embedding_dim: int | None = None
    normalized_head: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"
    quant: QuantScheme = DENSE

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed."""
        return replace(self, **changes)

    def with_layers(self, count: int) -> "ModelConfig":
        """The same model cut to its first `count` layers."""
        return replace(self, layers=self.layers[:count])

    def with_layers_of_each_kind(self, count: int) -> "ModelConfig":
        """The same model with the first `count` layers of each kind."""
        seen: dict[LayerSpec, int] = {}
        for layer in self.layers:
            seen[layer] = min(seen.get(layer, 0) + 1, count)
        return replace(self, layers=tuple(layer for layer, times in seen.items() for _ in range(times)))

    def for_length(self, length: int) -> "ModelConfig":
        """The model as it serves texts of up to `length` tokens; some rotary rules depend on that."""
        def served(spec: MixerSpec) -> MixerSpec:
            if isinstance(spec, DeltaSpec) or not spec.rope or not spec.rope.length:
                return spec
            return replace(spec, rope=replace(spec.rope, length=length))

        return replace(self, layers=tuple(replace(layer, mixer=served(layer.mixer)) for layer in self.layers))

    def part(self, devices: int, kv_devices: int) -> "ModelConfig":
        """The attention that each of `devices` devices computes; the KV heads are divided over `kv_devices` of them."""
        return replace(self, layers=tuple(
            replace(layer, mixer=layer.mixer.part(devices, kv_devices)) for layer in self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[TokenSpec, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if not isinstance(layer.mixer, DeltaSpec))

    @property
    def states(self) -> tuple[DeltaSpec, ...]:
        """The recurrent mixer of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaSpec))

    @property
    def kv_layout(self) -> KVLayout:
        """Where the keys and values, or the state, of each layer lie."""
        layout = make_layout(tuple(spec.window for spec in self.attention))
        if not self.states:
            return layout
        return with_states(layout, [isinstance(layer.mixer, DeltaSpec) for layer in self.layers])

    @property
    def has_latents(self) -> bool:
        """Whether pages hold latents, in place of keys and values."""
        return isinstance(self.attention[0], LatentSpec)

    @property
    def num_kv_heads(self) -> int:
        """K, which all layers share: their keys and values lie in pools of one shape."""
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """H, which all layers share."""
        return self.attention[0].head_dim
