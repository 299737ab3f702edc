"""A process with eight CPU devices that runs one step of a model with ALiBi on 1, 4 and 8 of them.

`python -m tests.support.sharded_alibi` prints the logits of each as JSON, and last those without ALiBi. No checkpoint
that can be loaded has it yet, so the model is made here.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.engine.planning import define
from jaxpaged.execution.kv_cache import KVCacheSpec
from jaxpaged.execution.params import placed
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.sharding import Placement, partition_of
from jaxpaged.execution.step_shape import StepShape
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_family
from tests.support.model_configs import uniform_layers, with_attention

FAMILY = find_family({"architectures": ["LlamaForCausalLM"]})
CONFIG = ModelConfig("test", model_dim=32, vocab_size=64, max_model_len=64, layers=uniform_layers(
    1, heads=8, kv_heads=4, head_dim=16, mlp_dim=48, rope=None, alibi=True))
TOKENS, SLOTS = 16, 2


def logits(config: ModelConfig, size: int) -> np.ndarray:
    """[2, V] after a prompt of 12 tokens and one of 4, on `size` devices."""
    partition, dtype = partition_of(config, size), jnp.dtype(jnp.float32)
    placement = Placement.of(jax.devices()[:size], partition)
    definition = define(FAMILY, dtype, config, partition)
    cache = KVCacheSpec.of(config, 16, dtype)
    programs = ProgramSet(
        definition.graph, definition.shapes, config, cache, StepShape((TOKENS,), SLOTS, 4, 16, 5),
        axes=definition.axes, placement=placement, vocab_size=config.vocab_size,
        dtype=dtype, platform="cpu")
    weights = nnx.to_pure_dict(nnx.state(FAMILY.build(config, dtype)))
    params = placed(jax.tree.map(np.asarray, weights), programs.params, programs.axes, placement)
    rows = np.zeros((4, TOKENS), np.int32)
    rows[0, 12:], rows[1, :12], rows[1, 12:] = 1, range(12), range(4)
    rows[2], rows[3] = np.arange(TOKENS) * 5 % 64, -1
    rows[3, [0, 12]] = 1, 2
    step = np.concatenate([rows.ravel(), [11, 15, 0, 1]]).astype(np.int32)
    wanted = programs.shapes
    pools = jax.tree.map(lambda leaf: placement.put(np.zeros(leaf.shape, leaf.dtype), leaf), wanted.pools)
    table, last_id, packed = (placement.put(array, wanted.int32(*array.shape)) for array in (
        np.zeros((1, SLOTS + 1, 4), np.int32), np.zeros(SLOTS + 1, np.int32), step))
    found, *_ = programs.get(("forward", TOKENS))(params, pools, table, last_id, packed)
    return np.asarray(found)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    found = [logits(CONFIG, size).tolist() for size in (1, 4, 8)]
    print(json.dumps([*found, logits(with_attention(CONFIG, alibi=False), 1).tolist()]))


if __name__ == "__main__":
    main()
