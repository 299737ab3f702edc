"""`python -m jaxpaged.compile`: compile a model's programs ahead of time, for a GPU that need not be installed."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpaged.commands.plan import add_device_flag, compiling_for, device_named, print_line
from jaxpaged.commands.quiet_jax import import_jax
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import add_flags, merge_model, new_parser, parse_flags

if TYPE_CHECKING:
    import jax

    from jaxpaged.engine.model_source import ModelSource
    from jaxpaged.engine.planning import EngineLayout
    from jaxpaged.execution.aot import ProgramFacts
    from jaxpaged.execution.devices import DeviceInfo
    from jaxpaged.execution.programs import ProgramSet
    from jaxpaged.execution.step_shape import ProgramName


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.compile") -> int:
    """Run the command.

    Returns:
        0; 1 after an error, reported in one line.
    """
    parser = new_parser(prog, "Compile all programs of a model, print the memory and time of each, and store them in a "
                        "directory for `python -m jaxpaged.server --compiled DIR`. MODEL needs only a config.json; "
                        "neither the weights nor the device are needed. Give the same flags as to the server.")
    add_device_flag(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="directory to store the programs in (default: none)")
    parser.add_argument("--jobs", metavar="N", type=int, help="programs to compile at once (default: one per core)")
    parser.add_argument("--no-kernels", action="store_true",
                        help="skip the second compilation, for a GPU, that counts kernels and command buffers")
    add_flags(parser, (EngineConfig,), leave_out=("device", "compiled"))
    given = parse_flags(parser, argv if argv is not None else sys.argv[1:])
    device, out = given.pop("device", "auto"), given.pop("out", None)
    jobs, kernels = given.pop("jobs", None), not given.pop("no_kernels", False)
    try:
        merge_model(given)
        config = EngineConfig(**given)
    except ConfigError as error:
        parser.error(str(error))
    try:
        _compile(config, device, out, jobs or len(os.sched_getaffinity(0)), kernels)
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program and its properties; kernels and command buffers are counted for a GPU only.

    Attributes:
        kernels: total number of launches, or those per layer in a forward pass.
    """

    executable: "jax.stages.Compiled"
    seconds: float
    facts: "ProgramFacts"
    kernels: float | None
    command_buffers: int | None


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model cut to a few layers, and its programs."""

    num_layers: int
    programs: "ProgramSet"


def compile_programs(
    programs: "ProgramSet", names: Sequence["ProgramName"], jobs: int, small: Sequence["SmallModel"] = ()
) -> dict["ProgramName", CompiledProgram]:
    """Compile programs on several threads, with a progress bar and without caches, so that each can be stored.

    Args:
        small: two models with the same kinds of layers, in whose programs kernels are counted, for a GPU.
    """
    import jax
    from tqdm import tqdm

    from jaxpaged.execution import aot

    def one(name: "ProgramName") -> CompiledProgram:
        began = time.monotonic()
        executable = programs.compile(name)
        seconds = time.monotonic() - began
        counted = _count_kernels(small, name) if small else (None, None)
        return CompiledProgram(executable, seconds, aot.facts_of(executable), *counted)

    done: dict[ProgramName, CompiledProgram] = {}
    # Programs read back from a cache, on disk or in memory, cannot be serialized again.
    jax.clear_caches()
    with (aot.no_persistent_cache(), ThreadPoolExecutor(jobs) as threads,
          tqdm(total=len(names), desc="Compiling programs", unit="program") as bar):
        work = {threads.submit(one, name): name for name in names}
        for job in as_completed(work):
            done[work[job]] = job.result()
            bar.update()
    return {name: done[name] for name in names}


def _count_kernels(small: Sequence[SmallModel], name: "ProgramName") -> tuple[float, int]:
    """Number of kernels, per layer for a forward pass, and of command buffers."""
    from jaxpaged.execution import aot

    counts = []
    for model in small if name[0] == "forward" else small[-1:]:
        with tempfile.TemporaryDirectory() as folder:
            # A second compilation: the dump folder would become part of the stored program.
            model.programs.compile(name, aot.dump_options(Path(folder)))
            kinds = [thunk.kind for thunk in aot.thunks(Path(folder))]
        counts.append(sum(kind not in aot.BRACKETS for kind in kinds))
    buffers = kinds.count("CommandBuffer")
    if len(counts) == 1:
        return counts[0], buffers
    return (counts[1] - counts[0]) / (small[1].num_layers - small[0].num_layers), buffers


def _compile(config: EngineConfig, device_name: str, out: Path | None, jobs: int, kernels: bool) -> None:
    import_jax()
    from jaxpaged.engine.startup import layout_of, model_of, programs_of
    from jaxpaged.loading.checkpoint import checkpoint_without_weights, read_config
    from jaxpaged.loading.hub import resolve_config

    if out is not None and out.exists() and not (out / "store.json").exists() and any(out.iterdir()):
        raise ConfigError(f"{out} contains other files; choose another directory with --out")
    path = resolve_config(config.model, config.revision, config.download_dir)
    hf = read_config(path)
    device = device_named(device_name, config)
    model = model_of(config, hf, device.platform, checkpoint_without_weights(path))
    with compiling_for(device_name):
        layout = layout_of(config, model, device, print_line)
    print("\n".join(layout.memory.lines(device.kind, (layout.max_model_len,))))
    programs = programs_of(config, layout, layout.definition, device, print_line)
    small = [] if device.platform == "cpu" or not kernels else _small(config, layout, model, device)
    compiled = compile_programs(programs, programs.names(), jobs, small)
    print("\n".join(table(compiled)))
    if out is not None:
        size = programs.store_in(out).save({name: item.executable for name, item in compiled.items()},
                                           layout.memory.num_blocks)
        print(f"{out}: {len(compiled)} programs, {size / 2**20:,.1f} MiB; start the server with --compiled {out}")


def _small(
    config: EngineConfig, layout: "EngineLayout", model: "ModelSource", device: "DeviceInfo"
) -> list[SmallModel]:
    """One layer of each kind, and two: both have what layers of a kind share, once in a step."""
    from jaxpaged.engine.startup import programs_of

    kinds = tuple(dict.fromkeys(model.config.layers))
    return [SmallModel(len(layers), programs_of(config, layout, model.define(
        replace(model.config, layers=layers), layout.partition), device, print_line)) for layers in (kinds, kinds * 2)]


def table(compiled: dict["ProgramName", CompiledProgram]) -> list[str]:
    """The programs as a table in Markdown."""
    rows = [("program", "seconds", "arguments", "aliased", "temporaries", "kernels", "collectives", "command buffers")]
    for (kind, count), item in compiled.items():
        facts = item.facts
        launches = "" if item.kernels is None else f"{item.kernels:g}{' per layer' if kind == 'forward' else ''}"
        rows.append((
            f"{kind} {count}", f"{item.seconds:.1f}", _mib(facts.argument_bytes), _mib(facts.alias_bytes),
            _mib(facts.temporary_bytes), launches, str(facts.collectives),
            "" if item.command_buffers is None else str(item.command_buffers)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
