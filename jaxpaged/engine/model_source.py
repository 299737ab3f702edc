"""A model without weights: what an engine is laid out for before it loads them."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpaged.engine.planning import ModelDefinition
from jaxpaged.execution.programs import ProgramSet
from jaxpaged.execution.sharding import Partition
from jaxpaged.execution.step_functions import Params
from jaxpaged.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """How to define a model for some devices, and how to load it.

    Attributes:
        dtype: of activations.
        load: takes the definition, the programs, and whether to show a progress bar.
        own_module: the module is the caller's own, in memory.
    """

    config: ModelConfig
    dtype: jnp.dtype
    define: Callable[[ModelConfig, Partition], ModelDefinition]
    load: Callable[[ModelDefinition, ProgramSet, bool], Params]
    own_module: bool = False
