"""Chooses the parts of a step that run in native CPU kernels, by the flags and by what can be built here."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.trusted_files import UntrustedFileError, check_trusted, make_private
from jaxpaged.engine.planning import Report
from jaxpaged.execution.step_functions import NativeKernels
from jaxpaged.loading.hub import cache_dir
from jaxpaged.models.config import ExpertsSpec, ModelConfig
from jaxpaged.models.quantization import QuantScheme
from jaxpaged.pallas_kernels import native_attention, native_build, native_experts, native_linear, native_packed
from jaxpaged.pallas_kernels.kv_pages import is_scaled
from jaxpaged.pallas_kernels.native_build import NativeKernel
from jaxpaged.pallas_kernels.native_packed import PER_WORD


def choose_native(
    config: EngineConfig, platform: str, dtype: jnp.dtype, cache_dtype: jnp.dtype, model: ModelConfig, report: Report
) -> NativeKernels:
    """Choose native kernels, build and register them; reports one line if they cannot be built.

    Args:
        platform: "cpu" or "cuda".
        dtype, cache_dtype: of activations and the KV pool.
        model: says how the weights lie in memory, and whether there are experts.

    Raises:
        ConfigError: a flag demands a native kernel that cannot run here.
    """
    attention = _wanted("--cpu-attention", config.cpu_attention, platform, {"--dtype": dtype,
                                                                            "--kv-cache-dtype": cache_dtype})
    if platform == "cpu" and config.cpu_attention == "auto" and is_scaled(cache_dtype):
        report("XLA computes attention, more slowly than the native kernel would, which reads no 8-bit pages")
    linear = _wanted("--cpu-linear", config.cpu_linear, platform, {"--dtype": dtype})
    kernels = [native_attention.KERNEL] * attention + _products(model, model.quant) * linear
    failure = _build(cache_dir() / "native", kernels) if kernels else None
    if failure is None:
        return NativeKernels(attention, linear)
    for flag, value in (("--cpu-attention", config.cpu_attention), ("--cpu-linear", config.cpu_linear)):
        if value == "native":
            raise ConfigError(f"{flag} native cannot be built: {failure}; use auto or xla")
    if model.quant.types:
        raise ConfigError(f"a native kernel cannot be built: {failure}; add --quantization none, since XLA does not "
                          "compute with weights as stored")
    parts = " and ".join(["attention"] * attention + ["linear layers"] * linear)
    report(f"XLA computes {parts}, more slowly than native kernels would: {failure}")
    return NativeKernels()


def keeps_stored(
    config: EngineConfig, platform: str, dtype: jnp.dtype, model: ModelConfig, quant: QuantScheme
) -> bool:
    """Whether native kernels can compute with the weights of a model in a scheme; builds them.

    Raises:
        ConfigError: --cpu-linear demands them, and they cannot run here.
    """
    return (config.quantization != "none"
            and _wanted("--cpu-linear", config.cpu_linear, platform, {"--dtype": dtype})
            and _build(cache_dir() / "native", _products(model, quant)) is None)


def _products(model: ModelConfig, quant: QuantScheme) -> list[NativeKernel]:
    kinds = ("float32", *quant.types)
    found = [native_packed.kernel_for(kind) if kind in PER_WORD else native_linear.kernel_for(kind) for kind in kinds]
    if any(isinstance(layer.mlp, ExpertsSpec) for layer in model.layers):
        found += [native_experts.kernel_for(kind) for kind in kinds if kind not in PER_WORD]
    return found


def _build(folder: Path, kernels: Sequence[NativeKernel]) -> str | None:
    try:
        make_private(folder)
    except (OSError, UntrustedFileError) as error:
        return f"libraries are not loaded from {folder}: {error}"
    return native_build.build(folder, kernels, check=check_trusted)


def _wanted(flag: str, value: str, platform: str, dtypes: dict[str, jnp.dtype]) -> bool:
    others = {name: dtype for name, dtype in dtypes.items() if dtype != jnp.float32}
    if value == "native" and platform != "cpu":
        raise ConfigError(f"{flag} native cannot run on {platform}; leave it out")
    if value == "native" and others:
        raise ConfigError(f"{flag} native needs float32; add {' and '.join(f'{name} float32' for name in others)}, "
                          "or leave it out")
    return value != "xla" and platform == "cpu" and not others
