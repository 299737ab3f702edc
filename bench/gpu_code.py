"""Reads what the compiler made of a GPU program: its launches, its copies and collectives, its kernels' PTX.

For bench_aot.py and the tests, which compare these numbers. Registers and spills need ptxas.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxpaged.core.errors import ConfigError
from jaxpaged.execution.aot import BRACKETS, COLLECTIVES, thunks
from jaxpaged.execution.gpu_targets import GpuSpec


@contextmanager
def mosaic_dump(folder: Path) -> Iterator[None]:
    """Make Mosaic GPU leave its kernels in `folder` too, each the first time that this process compiles it.

    It reads the environment alone, so this holds for the whole process.
    """
    wanted = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(folder)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of the program's thunk sequence: a kernel, a cuBLASLt product, a copy, a loop, ...

    Attributes:
        kind: XLA's name without its k, such as "CustomKernel" or "CublasLtMatmul".
        name: the kernel's, or the kind again.
        grid, threads, shared_bytes: of a kernel, else 0.
        in_graph: whether a command buffer (CUDA graph) holds it.
    """

    kind: str
    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    in_graph: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the compiler made of one kernel.

    Attributes:
        registers, spill_bytes: per thread, as ptxas says; spills are stores and loads together.
        threads: maximum in a block.
        shared_bytes: static, without what the launch adds; of a kernel by Mosaic GPU, as far as it is addressed.
        async_loads: `cp.async` instructions of 16 bytes; narrow_async_loads: of fewer.
        wide_loads, loads, wide_stores, stores: global memory; wide ones move 16 bytes per thread or more.
        mma, wgmma: tensor-core instructions, by warp or by warp group (Blackwell's tcgen05 among the latter).
        wait_groups: the number of groups of asynchronous loads that may still be under way at each wait, in order. A
            loop that waits for 0 does not load while it computes.
        loop: instructions of its longest loop, in PTX: with those of inline assembly, without constants.
        tma_loads, barriers: loads of whole boxes by the tensor memory accelerator, and the barriers in shared memory
            that signal their end.
    """

    name: str
    registers: int
    spill_bytes: int
    threads: int
    shared_bytes: int
    async_loads: int
    narrow_async_loads: int
    wide_loads: int
    loads: int
    wide_stores: int
    stores: int
    mma: int
    wgmma: int
    wait_groups: tuple[int, ...]
    loop: int
    tma_loads: int
    barriers: int

    @property
    def is_mosaic(self) -> bool:
        """Whether Mosaic GPU made it; it drops our names."""
        return self.name.endswith(_MOSAIC)

    @property
    def overlaps(self) -> bool:
        """Whether loads are still under way at some wait."""
        return max(self.wait_groups, default=0) > 0


@dataclass(frozen=True, slots=True)
class ArrayOp:
    """An instruction of the compiled module and the bytes of its result, such as an all-reduce or a copy."""

    kind: str
    shape: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramCode:
    """A compiled program, read. Without a dump there are no launches and no kernels."""

    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    copies: tuple[ArrayOp, ...]
    collectives: tuple[ArrayOp, ...]
    launches: tuple[Launch, ...]
    kernels: tuple[Kernel, ...]

    @property
    def command_buffers(self) -> int:
        return sum(launch.kind == "CommandBuffer" for launch in self.launches)

    @property
    def work(self) -> tuple[Launch, ...]:
        """Launches that are not only a bracket around others."""
        return tuple(launch for launch in self.launches if launch.kind not in BRACKETS)

    @property
    def outside_graphs(self) -> tuple[Launch, ...]:
        """Work that the host launches by itself, one by one."""
        return tuple(launch for launch in self.work if not launch.in_graph)

    def kernel(self, name: str) -> Kernel:
        """The kernel of this name; a compiler may have appended a number."""
        found = [kernel for kernel in self.kernels if re.fullmatch(rf"{re.escape(name)}(_\d+)?", kernel.name)]
        assert found, f"no kernel {name}; there are {[kernel.name for kernel in self.kernels]}"
        return found[0]

    def launch(self, name: str) -> Launch:
        """The first launch of this kernel."""
        return next(launch for launch in self.launches if re.fullmatch(rf"{re.escape(name)}(_\d+)?", launch.name))

    def launch_of(self, kernel: Kernel) -> Launch:
        """The first launch of a kernel. One by Mosaic GPU is a custom call to XLA, its sizes are those of its PTX."""
        if not kernel.is_mosaic:
            return self.launch(kernel.name)
        call = next(launch for launch in self.launches if launch.kind == "CustomCall")
        return replace(call, threads=kernel.threads, shared_bytes=kernel.shared_bytes)


_MOSAIC = "_mosaic_gpu_kernel"




def analyze(compiled: jax.stages.Compiled, dump: Path | None = None, *, kernels: str = "") -> ProgramCode:
    """Read a compiled program.

    Args:
        dump: folder that `dump_options` named when the program was compiled.
        kernels: pattern of the names of the kernels that ptxas is asked about; none if empty.

    Raises:
        ConfigError: ptxas is needed and missing.
    """
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend reports no memory"
    ops = tuple(array_ops(compiled.as_text() or ""))
    return ProgramCode(
        argument_bytes=int(memory.argument_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        temporary_bytes=int(memory.temp_size_in_bytes),
        copies=tuple(op for op in ops if op.kind == "copy"),
        collectives=tuple(op for op in ops if op.kind != "copy"),
        launches=_launches(dump) if dump else (),
        kernels=tuple(_kernels(dump, re.compile(kernels))) if dump and kernels else (),
    )


def resident_blocks(kernel: Kernel, launch: Launch, gpu: GpuSpec) -> int:
    """Blocks of a kernel that one multiprocessor holds at once, by registers, shared memory and threads."""
    warps = -(-launch.threads // 32)
    registers = -(-kernel.registers // 8) * 8 * 32 * warps
    shared = launch.shared_bytes + 1024  # the system's own share of each block
    return min(gpu.registers_per_sm // registers, gpu.shared_bytes_per_sm // shared,
               gpu.threads_per_sm // launch.threads, 32)


_OP = re.compile(rf"= (\S+|\([^=]*\)) (copy|{'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|c\d+)\[([\d,]*)\]")


def array_ops(text: str) -> Iterator[ArrayOp]:
    """Copies and collectives in the text of a compiled module."""
    for match in _OP.finditer(text):
        arrays = _ARRAY.findall(match[1])
        if match[3]:  # the result of a start holds its operands and its results
            arrays = arrays[len(arrays) // 2 :]
        sizes = [_bits(kind) * _product(shape) // 8 for kind, shape in arrays]
        yield ArrayOp(match[2], ", ".join(f"{kind}[{shape}]" for kind, shape in arrays), sum(sizes))


def _bits(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return 8 if kind == "pred" or digits is None else int(digits[0])


def _product(shape: str) -> int:
    result = 1
    for size in filter(None, shape.split(",")):
        result *= int(size)
    return result


_GRID = re.compile(r"\s*(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)")


def _launches(dump: Path) -> tuple[Launch, ...]:
    found, graph_depth = [], -1
    for thunk in thunks(dump):
        if thunk.depth <= graph_depth:
            graph_depth = -1
        in_graph = graph_depth >= 0
        if thunk.kind == "CommandBuffer" and not in_graph:
            graph_depth = thunk.depth
        shape = _GRID.match(thunk.text)
        name = shape[1] if shape else thunk.text.strip() or thunk.kind
        grid, threads, shared = (_sizes(shape[2]), _product(shape[3].replace(" ", "")), int(shape[4])) \
            if shape else ((), 0, 0)
        found.append(Launch(thunk.kind, name, grid, threads, shared, in_graph))
    return tuple(found)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


_ENTRY = re.compile(r"^\.visible \.entry (\w+)", re.MULTILINE)
_PTXAS = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
                    r"Used (\d+) registers([^\n]*)", re.DOTALL)


def _kernels(dump: Path, wanted: re.Pattern[str]) -> Iterator[Kernel]:
    for file in sorted(dump.glob("*.ptx")):
        text = file.read_text()
        starts = [(match.start(), match[1]) for match in _ENTRY.finditer(text)]
        if not any(wanted.search(name) for _, name in starts):
            continue
        arch = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        assert arch, f"{file} names no target"
        log = file.with_suffix(".ptxas")  # by Mosaic's own assembler, for PTX that ours may be too old for
        output = log.read_text() if log.exists() else subprocess.run(
            [ptxas(), "-v", f"-arch={arch[1]}", str(file), "-o", "/dev/null"], capture_output=True, text=True,
            check=True).stderr
        resources = {match[1]: match for match in _PTXAS.finditer(output)}
        ends = [start for start, _ in starts[1:]] + [len(text)]
        for (start, name), end in zip(starts, ends, strict=True):
            if wanted.search(name):
                yield _kernel(name, text[start:end], resources[name])


def _kernel(name: str, body: str, resources: re.Match[str]) -> Kernel:
    def count(pattern: str) -> int:
        return len(re.findall(pattern, body))

    shared = re.search(r"(\d+) bytes smem", resources[5])
    threads = re.search(r"^\.(?:max|req)ntid ([\d, ]+)", body, re.MULTILINE)
    # Mosaic's shared memory is sized at launch; it is as large as its highest address says.
    addressed = [int(address) + 8 for address in re.findall(r"__dynamic_shmem__0\+(\d+)", body)]
    return Kernel(
        name=name,
        registers=int(resources[4]),
        spill_bytes=int(resources[2]) + int(resources[3]),
        threads=_product(",".join(threads[1].split(", "))) if threads else 0,
        shared_bytes=max(addressed, default=int(shared[1]) if shared else 0),
        async_loads=count(r"cp\.async\.c[ga]\.shared\S*\.global[^;]*, *(?:0x10|16)\b"),
        narrow_async_loads=count(r"cp\.async\.ca\.shared\S*\.global[^;]*, *(?:0x[48]|[48])\b"),
        wide_loads=count(r"ld\.global\S*\.(?:v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)"),
        loads=count(r"ld\.global"),
        wide_stores=count(r"st\.global\S*\.(?:v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)"),
        stores=count(r"st\.global"),
        mma=count(r"\bmma\.sync"),
        wgmma=count(r"wgmma\.mma_async|tcgen05\.mma"),
        wait_groups=tuple(int(number) for number in re.findall(r"cp\.async\.wait_group\s+(\d+)", body)),
        loop=_longest_loop(body),
        tma_loads=count(r"cp\.async\.bulk\.tensor\S*\.global\.mbarrier"),
        barriers=count(r"mbarrier\.init"),
    )


_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")


def _longest_loop(body: str) -> int:
    """The most instructions between a label and a branch back to it."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in body.splitlines():
        label, branch = _LABEL.match(line.strip()), _BRANCH.search(line)
        if label:
            labels[label[1]] = count
        code = re.sub(r"//.*|\.reg\b[^;]*;|\bmov\.b32 +\S+, 0[xf]\w+;", "", line)
        count += 0 if code.strip().startswith(".") else code.count(";")
        if branch and branch[1] in labels:
            longest = max(longest, count - labels[branch[1]])
    return longest


def ptxas() -> str:
    """Path of NVIDIA's assembler, from its wheel or from PATH.

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [file for folder in folders for file in sorted(folder.glob("*/bin/ptxas"))]
    path = str(found[0]) if found else shutil.which("ptxas")
    if path is None:
        raise ConfigError("ptxas is missing: pip install nvidia-cuda-nvcc-cu12")
    return path
