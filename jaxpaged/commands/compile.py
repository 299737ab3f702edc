"""`python -m jaxpaged.compile`: compile a model's programs ahead of time, for a GPU that need not be here."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpaged.commands.plan import add_device_flag, compiling_for, device_named
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import add_flags, new_parser, parse_flags, settle_model

if TYPE_CHECKING:
    import jax

    from jaxpaged.engine.planning import EngineLayout
    from jaxpaged.engine.startup import ModelSource
    from jaxpaged.execution.aot import ProgramFacts
    from jaxpaged.execution.devices import DeviceInfo
    from jaxpaged.execution.programs import ProgramSet
    from jaxpaged.execution.step_shape import ProgramName


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.compile") -> int:
    """Run the command.

    Returns:
        0; 1 after an error told in one line.
    """
    parser = new_parser(prog, "Compile the closed set of programs of a model, print what each takes, and keep them in "
                        "a directory for `python -m jaxpaged.server --compiled DIR`. A config.json is enough for "
                        "MODEL; neither weights nor the device have to be there. Give the flags that the server gets.")
    add_device_flag(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, help="directory of the store; without it nothing is kept")
    parser.add_argument("--jobs", metavar="N", type=int, help="programs to compile at once (default: one per core)")
    parser.add_argument("--no-kernels", action="store_true",
                        help="do not compile a second time, for a GPU, to count kernels and command buffers")
    add_flags(parser, (EngineConfig,), leave_out=("device", "compiled"))
    given = parse_flags(parser, argv if argv is not None else sys.argv[1:])
    device, out = given.pop("device", "auto"), given.pop("out", None)
    jobs, kernels = given.pop("jobs", None), not given.pop("no_kernels", False)
    try:
        settle_model(given)
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
    """A program and what is told of it; kernels and command buffers are those of a GPU, if they were counted.

    Attributes:
        kernels: launches of work in all, or per layer in a forward pass.
    """

    executable: "jax.stages.Compiled"
    seconds: float
    facts: "ProgramFacts"
    kernels: float | None
    command_buffers: int | None


def compile_programs(
    programs: "ProgramSet", names: Sequence["ProgramName"], jobs: int, small: Sequence["ProgramSet"] = ()
) -> dict["ProgramName", CompiledProgram]:
    """Compile programs on several threads, with a progress bar; each anew, so that it can be stored.

    Args:
        small: the same programs for a model of one layer and of two; from those kernels are counted, on a GPU.
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
    # What the cache has read back cannot be written down again, and JAX may hold some of that in memory.
    jax.clear_caches()
    with (aot.no_persistent_cache(), ThreadPoolExecutor(jobs) as threads,
          tqdm(total=len(names), desc="Compiling programs", unit="program") as bar):
        work = {threads.submit(one, name): name for name in names}
        for job in as_completed(work):
            done[work[job]] = job.result()
            bar.update()
    return {name: done[name] for name in names}


def _count_kernels(small: Sequence["ProgramSet"], name: "ProgramName") -> tuple[float, int]:
    """Kernels per layer of a forward pass, in all of another program; and command buffers."""
    from jaxpaged.execution import aot

    counts = []
    for programs in small if name[0] == "forward" else small[-1:]:
        with tempfile.TemporaryDirectory() as folder:
            # A second time: where XLA leaves its notes would become a part of the program that is kept.
            programs.compile(name, aot.dump_options(Path(folder)))
            kinds = [thunk.kind for thunk in aot.thunks(Path(folder))]
        counts.append(sum(kind not in aot.BRACKETS for kind in kinds))
    return counts[-1] - (counts[0] if len(counts) > 1 else 0), kinds.count("CommandBuffer")


def _compile(config: EngineConfig, device_name: str, out: Path | None, jobs: int, kernels: bool) -> None:
    # Only here: --help and a bad flag answer at once.
    from jaxpaged.engine.startup import layout_of, model_of, programs_of
    from jaxpaged.loading.checkpoint import read_config
    from jaxpaged.loading.hub import resolve_config

    if out is not None and out.exists() and not (out / "store.json").exists() and any(out.iterdir()):
        raise ConfigError(f"{out} holds other files; name another directory with --out")
    hf = read_config(resolve_config(config.model, config.revision, config.download_dir))
    device = device_named(device_name, config, _say)
    if not device.devices:
        raise ConfigError(f"there is no compiler for {device_name} here")
    model = model_of(config, hf, device.platform)
    with compiling_for(device_name):
        layout = layout_of(config, model, device, _say)
    print("\n".join(layout.memory.lines(device.kind, (layout.max_model_len,))))
    programs = programs_of(config, layout, layout.definition, device, _say)
    small = [] if device.platform == "cpu" or not kernels else _small(config, layout, model, device)
    compiled = compile_programs(programs, programs.names(), jobs, small)
    print("\n".join(table(compiled)))
    if out is not None:
        size = programs.store_in(out).save({name: item.executable for name, item in compiled.items()},
                                           layout.memory.num_blocks)
        print(f"{out}: {len(compiled)} programs, {size / 2**20:,.1f} MiB; start the server with --compiled {out}")


def _small(
    config: EngineConfig, layout: "EngineLayout", model: "ModelSource", device: "DeviceInfo"
) -> list["ProgramSet"]:
    from jaxpaged.engine.startup import programs_of

    return [programs_of(config, layout, model.define(model.config.with_layers(layers), layout.partition), device,
                        _say) for layers in (1, 2)]


def table(compiled: dict["ProgramName", CompiledProgram]) -> list[str]:
    """A table of the programs, in Markdown."""
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
