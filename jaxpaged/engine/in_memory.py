"""Models in the caller's memory: a module and its parameters, as research code has them."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.errors import ConfigError
from jaxpaged.engine.model_source import ModelSource
from jaxpaged.engine.planning import DTYPES, ModelDefinition, Report, define
from jaxpaged.execution.params import check_params, leaf_names, placed, plain_tree
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.sharding import Partition, axes_tree
from jaxpaged.execution.step_functions import Params
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.registry import find_family
from jaxpaged.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class InMemoryModel:
    """A module, and weights as `nnx.to_pure_dict` returns them."""

    module: Transformer
    params: Mapping[Any, Any]


def in_memory_model(model: Any) -> InMemoryModel | None:
    """A (module, params) pair as a model in memory; None for a name or path.

    Raises:
        ConfigError: a pair of something else.
    """
    if isinstance(model, (str, os.PathLike)):
        return None
    if not isinstance(model, tuple) or len(model) != 2 or not isinstance(model[0], Transformer):
        raise ConfigError("model must be a name, a path, or a pair of a jaxpaged Transformer module and its params")
    if not isinstance(model[1], Mapping):
        raise ConfigError("the params of a (module, params) pair must be a nested dict, as nnx.to_pure_dict makes it")
    return InMemoryModel(*model)


def source_in_memory(
    model: InMemoryModel, dtype: str, report: Report, max_model_len: int | None = None
) -> ModelSource:
    """The model as an engine loads it. A module that is not the plain one of its family runs as it is, on one device.

    Args:
        dtype: of activations, as in `EngineConfig`; auto: that of the weights.
        max_model_len: as in `EngineConfig`.

    Raises:
        ConfigError: the params are not the module's, or not of a dtype that models run in.
    """
    config = model.module.config
    family = find_family({"architectures": [config.architecture]})
    graph, state = nnx.split(model.module)
    params = plain_tree(model.params)
    check_params(params, nnx.to_pure_dict(state), what="the params", but_dtypes=True)
    kind = _dtype(params, dtype, report)
    changed = _first_change(model.module, family.outline(config, kind))
    if changed:
        report(f"running the module that was given, which is not the plain one of {config.architecture}: {changed}")

    served = config.for_length(max_model_len) if max_model_len else config

    def own(wanted: ModelConfig, partition: Partition) -> ModelDefinition:
        if partition.size > 1:
            raise ConfigError(f"the module is not the plain one of its family ({changed}), and such a module runs on "
                              "one device: leave out tensor_parallel_size")
        shapes = jax.eval_shape(lambda: params)
        return ModelDefinition(served, graph, shapes, axes_tree(shapes, family.weights, config, partition), shapes,
                               config.vocab_size)

    def plain(wanted: ModelConfig, partition: Partition) -> ModelDefinition:
        found = define(family, kind, wanted, partition)
        return found if wanted.num_layers < config.num_layers else _with_dtypes(found, params)

    def load(definition: ModelDefinition, programs: ProgramSet, progress: bool) -> Params:
        return placed(params, programs.params, definition.axes, programs.placement)

    return ModelSource(served, kind, own if changed else plain, load, own_module=bool(changed))


def _with_dtypes(definition: ModelDefinition, params: Params) -> ModelDefinition:
    shapes = jax.tree.map(lambda shape, param: jax.ShapeDtypeStruct(shape.shape, param.dtype), definition.shapes,
                          params)
    return replace(definition, shapes=shapes)


def _dtype(params: Params, wanted: str, report: Report) -> jnp.dtype:
    sizes: Counter[str] = Counter()
    for name, leaf in leaf_names(params):
        if str(leaf.dtype) not in DTYPES:
            raise ConfigError(f"{name} has the dtype {leaf.dtype}; cast it to one of {', '.join(DTYPES)}")
        sizes[str(leaf.dtype)] += leaf.size
    kinds = [kind for kind, _ in sizes.most_common()]
    if wanted == "auto":
        if len(kinds) > 1:
            report(f"weights of {' and '.join(kinds)}: activations are {kinds[0]}, as most weights are; "
                   f"dtype= says otherwise")
        return jnp.dtype(kinds[0])
    if wanted not in kinds:
        raise ConfigError(f"dtype={wanted}, but the weights are {' and '.join(kinds)}; leave dtype out, or cast them: "
                          f"jax.tree.map(lambda leaf: leaf.astype({wanted!r}), params)")
    return jnp.dtype(wanted)


def _first_change(module: Transformer, plain: Transformer) -> str | None:
    """Where a module is not the plain one of its family; None if nowhere."""
    graph, wanted = nnx.split(module)[0], nnx.split(plain)[0]
    if graph == wanted:
        return None
    kinds = {path: type(node) for path, node in nnx.iter_graph(plain)}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module) and type(node) is not kinds.get(path):
            where = ".".join(map(str, path)) or "the model"
            return f"{where} is a {type(node).__name__}"
    return "attributes of its modules differ"
