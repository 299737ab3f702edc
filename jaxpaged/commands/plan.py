"""`python -m jaxpaged.plan`: how a model fits a device's memory, and how many requests fit; needs neither."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.commands.quiet_jax import import_jax
from jaxpaged.core.config import DEFAULT_MEMORY_SHARE, EngineConfig
from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import Parser, add_flags, merge_model, new_parser, parse_flags

if TYPE_CHECKING:
    import jax

    from jaxpaged.execution.devices import DeviceInfo
    from jaxpaged.models.config import ModelConfig

_HERE = ("auto", "cpu", "cuda")


def add_device_flag(parser: Parser) -> None:
    """Add --device, which also takes the names of GPUs that are not installed."""
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, auto (default: what is installed), or a GPU that "
                        "need not be here: a100-40g, a100-80g, a10, l4, l40s, h100, h200, b200")


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.plan") -> int:
    """Run the command.

    Returns:
        0; 1 if the model does not fit or cannot be read, reported in one line.
    """
    parser = new_parser(prog, "Print the memory plan of a model on a device, as the engine does at start. MODEL needs "
                        "only a config.json; neither the weights nor the device are needed.")
    add_device_flag(parser)
    parser.add_argument("--lengths", metavar="N", type=int, nargs="+",
                        help="request lengths in tokens for which to count concurrent requests")
    parser.add_argument("--no-compile", action="store_true",
                        help="use an upper bound of temporary memory instead of compiling the largest step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_flags(parser, (EngineConfig,), leave_out=("device",))
    given = parse_flags(parser, argv if argv is not None else sys.argv[1:])
    device, lengths = given.pop("device", "auto"), given.pop("lengths", None)
    no_compile, as_json = given.pop("no_compile", False), given.pop("json", False)
    try:
        merge_model(given)
        if lengths and min(lengths) < 1:
            raise ConfigError("--lengths must be at least 1")
        config = EngineConfig(**given)
    except ConfigError as error:
        parser.error(str(error))
    try:
        text, values = _plan(config, device, not no_compile, lengths)
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(values, indent=2) if as_json else "\n".join(text))
    return 0


def device_named(
    name: str, config: EngineConfig, *, compiling: bool = True, report: Callable[[str], None] | None = None
) -> "DeviceInfo":
    """The device to plan and compile for: an installed one, or a GPU by its name.

    Of a GPU by its name `devices` is empty unless `compiling`, or where there is no compiler and `report` gets the
    reason.

    Raises:
        ConfigError: no such device; no compiler for it, without `report`.
    """
    from jaxpaged.execution import aot
    from jaxpaged.execution.devices import DeviceInfo, fix_platform, select_device
    from jaxpaged.execution.gpu_targets import find_gpu

    count = config.tensor_parallel_size
    if name in _HERE:
        return select_device(name, count, config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE)
    gpu = find_gpu(name)
    fix_platform("cpu")
    devices: tuple[jax.Device, ...] = ()
    if compiling:
        try:
            devices = aot.compile_only_devices(gpu, count)
        except ConfigError as error:
            if report is None:
                raise
            report(str(error))
    return DeviceInfo("cuda", gpu.kind, gpu.memory_bytes, devices)


def compiling_for(name: str) -> contextlib.AbstractContextManager[None]:
    """A context for compiling for this device: JAX's cache works for installed devices only."""
    from jaxpaged.execution import aot

    return contextlib.nullcontext() if name in _HERE else aot.no_persistent_cache()


def _plan(
    config: EngineConfig, device_name: str, compiling: bool, lengths: Sequence[int] | None
) -> tuple[list[str], dict[str, Any]]:
    """The plan as text and for --json."""
    import_jax()
    from jaxpaged.engine.planning import lengths_of_interest
    from jaxpaged.engine.startup import layout_of, model_of, temporaries_matter
    from jaxpaged.loading.checkpoint import checkpoint_without_weights, read_config
    from jaxpaged.loading.hub import resolve_config

    path = resolve_config(config.model, config.revision, config.download_dir)
    hf = read_config(path)
    device = device_named(device_name, config, compiling=compiling, report=print_line)
    compiling = compiling and temporaries_matter(config, device)
    if compiling:
        print_line("compiling the largest step ...")
    with compiling_for(device_name):
        model = model_of(config, hf, device.platform, checkpoint_without_weights(path))
        layout = layout_of(config, model, device, print_line, compiling=compiling)
    memory = layout.memory
    lengths = sorted(set(lengths or lengths_of_interest(layout.max_model_len)))
    text = memory.lines(device.kind, tuple(lengths))
    text.append(f"  {layout.definition.num_parameters:,} parameters in {layout.dtype.name}; temporaries are "
                f"{'those of the compiled step' if compiling else 'an upper bound, not compiled'}")
    parts = layout.definition.bytes_by_part(layout.partition)
    text[2:2] = _part_lines(layout.definition.config, parts)
    return text, {
        "device": device.kind,
        **dataclasses.asdict(memory),
        "weight_bytes_by_part": parts,
        "latent_dim": layout.cache.head_dim if layout.definition.config.has_latents else None,
        "pool_bytes": memory.pool_bytes,
        "tokens": memory.tokens,
        "temporaries_compiled": compiling,
        "parameters": layout.definition.num_parameters,
        "dtype": layout.dtype.name,
        "kv_cache_dtype": layout.cache.dtype.name,
        "max_model_len": layout.max_model_len,
        "max_num_seqs": layout.shape.max_num_seqs,
        "max_num_batched_tokens": layout.max_num_batched_tokens,
        "step_sizes": list(layout.shape.sizes),
        "concurrent_requests": {str(length): memory.concurrent(length) for length in lengths},
    }


def _part_lines(model: "ModelConfig", parts: dict[str, int]) -> list[str]:
    """What the weights of a mixture of experts are, and what pages hold that are not keys and values."""
    from jaxpaged.engine.memory_plan import size_text
    from jaxpaged.models.config import ExpertsSpec

    lines = []
    for spec in {(layer.mlp.count, layer.mlp.routing.top_k) for layer in model.layers
                 if isinstance(layer.mlp, ExpertsSpec)}:
        lines.append(f"  of the weights, experts {size_text(parts['experts'])} ({spec[1]} of {spec[0]} for a token), "
                     f"MLPs beside them {size_text(parts['shared'])}, everything else {size_text(parts['others'])}")
    if model.has_latents:
        lines.append(f"  pages hold latents, {model.head_dim} numbers of a token in each layer, whole on every device")
    return lines


def print_line(line: str) -> None:
    """Report progress on stderr; stdout is for the result."""
    print(line, file=sys.stderr, flush=True)
