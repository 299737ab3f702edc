"""Host memory in huge pages where the system has them.

On CPU the weights and the KV pools are read from end to end, or at random, every step. With 4 KiB pages much of that
time goes into address translation; 2 MiB pages gave 10 to 20 % shorter steps. All of it is best effort: if the system
call is missing or refused, memory works as usual.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_HUGE_PAGE = 2**21
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for mallopt
_ALIGNMENT = 64  # at this alignment the CPU backend uses host memory as it is, without a copy


class HostArena:
    """One block of zeroed memory that many arrays are allocated from; it lives as long as any of them.

    Args:
        size: bytes of all arrays together.
        count: number of arrays, for the gaps between them.
    """

    def __init__(self, size: int, count: int) -> None:
        self._memory = np.zeros(size + count * _ALIGNMENT + _ALIGNMENT, np.uint8)
        self._next = -self._memory.ctypes.data % _ALIGNMENT
        self._lock = threading.Lock()
        _advise(self._memory.ctypes.data, self._memory.nbytes, mmap_advice("MADV_HUGEPAGE"))

    def allocate(self, size: int) -> np.ndarray:
        """`size` bytes, aligned to 64; may be called from several threads."""
        with self._lock:
            first = self._next
            self._next = first + size + -size % _ALIGNMENT
        assert self._next <= self._memory.nbytes, f"the arena of {self._memory.nbytes} bytes is full"
        return self._memory[first : first + size]


def zeros(size: int) -> np.ndarray:
    """`size` zero bytes of their own, aligned to 64."""
    return HostArena(size, 1).allocate(size)


class ByteBudget:
    """A bound on the bytes that threads use together; a thread that wants more than is left waits.

    Args:
        limit: the maximum that one thread may want.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes inside a with statement."""
        assert size <= self._limit, f"{size} bytes of {self._limit}"
        with self._changed:
            self._changed.wait_for(lambda: self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


def forget_pages(data: mmap.mmap, start: int, size: int) -> None:
    """Release the pages of a part of a mapped file; they would count as this process's memory."""
    advice = mmap_advice("MADV_DONTNEED")
    if advice is not None and size:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(advice, first, start + size - first)


def move_zeros_to_huge_pages(address: int, size: int) -> None:
    """Back memory that is all zeros by huge pages: released to the system, it reads as zeros again."""
    drop, huge = mmap_advice("MADV_DONTNEED"), mmap_advice("MADV_HUGEPAGE")
    if huge is not None and _advise(address, size, huge):
        _advise(address, size, drop)


def return_free_memory() -> None:
    """Release the freed memory that the C library caches: compiling leaves hundreds of megabytes of it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _AllocatorState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def allocated_bytes() -> int:
    """Bytes allocated from the C library in all threads; 0 where it does not report them."""
    state = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if state is None:
        return 0
    state.restype = _AllocatorState
    found = state()
    return int(found.uordblks + found.hblkhd)


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Inside, the C library returns every freed block of 1 MiB or more to the system.

    It would cache some for each thread: five tensors' worth where Orbax reads on many. Afterwards its thresholds are
    those that it sets itself after the first large block is freed.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 2**25)
        set_option(_TRIM_THRESHOLD, 2**26)


def mmap_advice(name: str) -> int | None:
    """The number of an madvise advice; None where the system lacks it."""
    return getattr(mmap, name, None) if sys.platform == "linux" else None


def _advise(address: int, size: int, advice: int | None) -> bool:
    """madvise the huge pages that lie within a range; False if it was refused, or there are none."""
    first = address + -address % _HUGE_PAGE
    length = (address + size - first) // _HUGE_PAGE * _HUGE_PAGE
    if advice is None or length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, length, advice) == 0)
