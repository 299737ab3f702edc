"""Files that code is loaded from: only the user, and the system's administrator, may be able to write them."""

import os
import shutil
import stat
from pathlib import Path


class UntrustedFileError(Exception):
    """Somebody else could have written the file; the text names what to change."""


def check_trusted(path: Path) -> None:
    """Raise UntrustedFileError unless the file or folder, and all folders above it, are the user's or root's.

    Neither the file nor the folder that it is in may be writable by others. The folders above may be writable by a
    group, as a home directory often is, and by all where each may only remove what is their own, as in /tmp.
    """
    place = path.resolve()
    _check(place, os.stat(place), stat.S_IWGRP | stat.S_IWOTH)
    if place.is_dir():
        above = [*place.parents]
    else:
        _check(place.parent, os.stat(place.parent), stat.S_IWGRP | stat.S_IWOTH)
        above = [*place.parents][1:]
    for folder in above:
        found = os.stat(folder)
        _check(folder, found, 0 if found.st_mode & stat.S_ISVTX else stat.S_IWOTH)


def read_trusted(path: Path) -> bytes:
    """The content of a file that passes `check_trusted`."""
    with path.open("rb") as file:
        check_trusted(path)
        _check(path, os.fstat(file.fileno()), stat.S_IWGRP | stat.S_IWOTH)  # of the very file that is read
        return file.read()


def make_private(folder: Path) -> None:
    """Make a folder that only the user may write, or make an existing one of theirs so.

    Whatever is in a folder that others were able to write is removed.

    Raises:
        UntrustedFileError: it belongs to somebody else, or is in a folder that others may write.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
        for item in folder.iterdir():
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    check_trusted(folder)


def _check(place: Path, found: os.stat_result, forbidden: int) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise UntrustedFileError(f"{place} belongs to another user")
    if found.st_mode & forbidden:
        raise UntrustedFileError(f"{place} can be written by others; chmod go-w {place}")
