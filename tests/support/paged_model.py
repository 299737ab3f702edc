"""A checkpoint whose steps a test puts together itself: some tokens of some requests, over pages in no order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.weights import load_params
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.metadata import make_metadata
from jaxpaged.models.registry import find_family
from jaxpaged.models.transformer import Pools, Transformer
from jaxpaged.pallas_kernels.kv_pages import KVPages, LatentPages

BLOCK, WIDTH, REQUESTS = 16, 8, 2


def load(folder: Path, dtype: Any = jnp.float32) -> tuple[nnx.GraphDef[Transformer], dict[Any, Any], ModelConfig]:
    """The definition, weights and config of a checkpoint."""
    checkpoint = open_checkpoint(folder)
    family = find_family(checkpoint.config)
    config = family.config_from_hf(checkpoint.config)
    graph, state = nnx.split(nnx.eval_shape(lambda: family.build(config, dtype)))
    return graph, load_params(nnx.to_pure_dict(state), family.weights, checkpoint, config=config,
                              ignored=family.ignored, dtype=dtype), config


class PagedModel:
    """A model of one program, for steps of up to `rows` tokens of two requests of up to 128 tokens each.

    Args:
        max_model_len: of the texts that are served, where not the model's own.
    """

    def __init__(self, folder: Path, *, rows: int = 100, max_model_len: int | None = None,
                 dtype: Any = jnp.float32) -> None:
        graph, self._params, config = load(folder, dtype)
        config = config.for_length(max_model_len or config.max_model_len)
        self._rows, layout = rows, config.kv_layout
        units = layout.column_units
        pages = np.random.default_rng(0).permutation(REQUESTS * WIDTH).reshape(REQUESTS, WIDTH) + 1
        blocks = np.concatenate([pages, np.zeros((1, WIDTH), np.int64)])  # the null slot's
        self._table = np.stack([np.where(blocks, units * blocks + unit, 0) for unit in range(units)]).astype(np.int32)
        first = units * (REQUESTS * WIDTH + 1)
        width = KVCacheSpec.of(config, BLOCK, dtype).state_width(config)
        units_of = np.random.default_rng(1).permutation(REQUESTS * width).reshape(REQUESTS, width) + first
        self._states = np.concatenate([units_of, np.zeros((1, width), np.int64)]).astype(np.int32) if width else None
        pool = jnp.zeros((first + units_of.size, BLOCK, config.num_kv_heads, config.head_dim), dtype)
        self._pools: Pools = tuple(LatentPages(jnp.copy(pool)) if config.has_latents else
                                   KVPages(jnp.copy(pool), jnp.copy(pool)) for _ in range(layout.num_strips))

        states = None if self._states is None else jnp.asarray(self._states)

        @jax.jit
        def run(params: Any, pools: Any, ids: jax.Array, slot: jax.Array, position: jax.Array, table: jax.Array) -> Any:
            meta = make_metadata(slot, position, table, config, BLOCK, state_table=states)
            return nnx.merge(graph, params)(ids, jnp.arange(rows), pools, meta)

        given = (self._params, self._pools, *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 3, self._table)
        sooner: dict[str, str | bool | int] = {"xla_backend_optimization_level": 0}
        self._run = run.lower(*given).compile(sooner)  # type: ignore[arg-type]

    def step(self, *chunks: tuple[int, int, Sequence[int]]) -> list[np.ndarray]:
        """Compute chunks of (request, position of its first token, ids): the logits [T, V] of each."""
        ids, slot, position = (np.full(self._rows, value, np.int32) for value in (0, REQUESTS, 0))
        first, bounds = 0, []
        for request, start, tokens in chunks:
            part = slice(first, first + len(tokens))
            ids[part], slot[part], position[part] = tokens, request, range(start, start + len(tokens))
            bounds.append(part)
            first += len(tokens)
        logits, self._pools = self._run(self._params, self._pools, ids, slot, position, self._table)
        assert logits.dtype == jnp.float32
        return [np.asarray(logits)[part] for part in bounds]

    @property
    def has_states(self) -> bool:
        return self._states is not None

    def share(self, blocks: int) -> None:
        """Let the second request begin with so many blocks of the first, as after a prefix hit or a fork.

        And with a copy of its state, which is that after these blocks if it has computed no more.
        """
        self._table[:, 1, :blocks] = self._table[:, 0, :blocks]
        if self._states is not None:
            source, target = self._states[:REQUESTS]
            self._pools = jax.tree.map(lambda pool: pool.at[target].set(pool[source]), self._pools)
