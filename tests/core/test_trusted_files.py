"""Which files code may be loaded from."""

import os
from pathlib import Path

import pytest

from jaxpaged.core.trusted_files import UntrustedFileError, check_trusted, make_private, read_trusted

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in a folder in one that all may write."""
    found = tmp_path / "shared" / "mine" / "code"
    found.mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / "mine").chmod(0o775)  # as under a umask of 002
    found.chmod(0o755)
    (found / "file").write_bytes(b"code")
    (found / "file").chmod(0o644)
    return found


def test_ones_own_files_are_trusted(folder: Path, tmp_path: Path) -> None:
    assert read_trusted(folder / "file") == b"code"
    check_trusted(folder)
    (tmp_path / "link").symlink_to(folder)
    assert read_trusted(tmp_path / "link" / "file") == b"code"
    with pytest.raises(FileNotFoundError):
        read_trusted(folder / "none")


@pytest.mark.parametrize(("place", "mode"), [
    ("file", 0o664), ("file", 0o646), (".", 0o775), (".", 0o1777), ("..", 0o777), ("../..", 0o777)])
def test_what_others_can_write_is_not_trusted(folder: Path, tmp_path: Path, place: str, mode: int) -> None:
    (tmp_path / "link").symlink_to(folder / "file")
    (folder / place).chmod(mode)
    for path in (folder / "file", tmp_path / "link"):
        with pytest.raises(UntrustedFileError, match="written by others; chmod go-w"):
            read_trusted(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["file", ".", "..", "../.."])
def test_what_belongs_to_others_is_not_trusted(folder: Path, place: str) -> None:
    os.chown(folder / place, NOBODY, NOBODY)
    with pytest.raises(UntrustedFileError, match="another user"):
        read_trusted(folder / "file")
    if place != "file":
        with pytest.raises(UntrustedFileError, match="another user"):
            make_private(folder)


def test_a_private_folder(folder: Path) -> None:
    new = folder / "a" / "b"
    make_private(new)
    assert new.stat().st_mode & 0o777 == 0o700
    make_private(folder)
    assert (folder / "file").exists()
    folder.chmod(0o775)
    (folder / "link").symlink_to("/etc")
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
    folder.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError, match=str(folder.parent)):
        make_private(folder)
