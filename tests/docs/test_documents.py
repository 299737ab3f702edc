"""What the documents name exists: files, links, anchors, modules, flags; and the generated page is up to date."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

from jaxpaged.core.compatibility import OLD_FLAGS
from tests.support.documents import ROOT, Document, documents

DOTTED = re.compile(r"(?<![\w/])jaxpaged(\.\w\w+)+")
FOLDERS = tuple(f"{folder.name}/" for folder in ROOT.iterdir() if folder.is_dir())
ROOM_FOLDERS = tuple(f"{folder.name}/" for folder in (ROOT / "jaxpaged").iterdir() if folder.is_dir())
LANGUAGES = {"sh", "python", "text", "nginx", "ini", "yaml"}
COMMANDS = ("server", "plan", "compile", "convert", "models")


@pytest.fixture(params=documents(), ids=lambda document: document.name)
def document(request: pytest.FixtureRequest) -> Document:
    found: Document = request.param
    return found


def test_links_lead_somewhere(document: Document) -> None:
    for link in document.links():
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (document.path.parent / path).resolve() if path else document.path
            assert target.exists(), f"{document.name} links to {link}"
            assert not anchor or anchor in Document(target).anchors(), f"{document.name} links to {link}"


def test_files_exist(document: Document) -> None:
    """Paths in backticks, from the root or, for the package's rooms, from jaxpaged/."""
    for span in document.spans():
        path = span.split("#")[0].split("::")[0]
        if re.fullmatch(r"[\w./-]+", path) and path.startswith((*FOLDERS, *ROOM_FOLDERS)):
            assert any((folder / path).exists() or (folder / f"{path}.py").exists()
                       for folder in (ROOT, ROOT / "jaxpaged")), f"{document.name}: there is no {path}"


def test_modules_and_names_exist(document: Document) -> None:
    for found in DOTTED.finditer(document.text):
        module, names = found[0], list[str]()
        while True:
            try:
                value = import_module(module)
                break
            except ModuleNotFoundError:
                module, _, name = module.rpartition(".")
                names.insert(0, name)
        for name in names:
            assert hasattr(value, name), f"{document.name}: there is no {found[0]}"
            value = getattr(value, name)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Those of the commands, of the benchmarks and of the documents' own script, and some of other programs."""
    found = {*OLD_FLAGS, "--check", "--durations"}
    for script in (ROOT / "bench").glob("*.py"):
        found |= set(re.findall(r'"(--[a-z][\w-]+)"', script.read_text()))
    for command in COMMANDS:
        done = subprocess.run([sys.executable, "-m", f"jaxpaged.{command}", "--help"], cwd=ROOT, check=True,
                              capture_output=True, text=True)
        found |= set(re.findall(r"--[a-z][\w-]+", done.stdout))
    return found


def test_flags_exist(document: Document, known_flags: set[str]) -> None:
    named = {flag for span in document.spans() for flag in re.findall(r"(?:^|\s)(--[a-z][\w-]+)", span)}
    assert named <= known_flags, f"{document.name}: there are no {sorted(named - known_flags)}"


def test_code_is_in_fences_with_a_language(document: Document) -> None:
    assert {language for language, _ in document.blocks()} <= LANGUAGES
    assert not re.search(r"\n\n    \S", document.prose), "commands in indented blocks are not tested"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_limits_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/make_limits.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python docs/make_limits.py"


def test_the_page_of_models_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "docs/make_models.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python docs/make_models.py"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(Document(ROOT / "README.md").links())
    for found in documents():
        assert found.name in linked | {"README.md"}, f"README.md does not link to {found.name}"


def test_tables_of_figures_say_when_and_how_they_were_measured() -> None:
    """Each section of the benchmarks with a table names a date, a commit and a command."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if "\n|" in section:
            title = section.splitlines()[0]
            assert re.search(r"20\d\d-\d\d-\d\d", section), f"{title}: no date"
            assert re.search(r"\b[0-9a-f]{7}\b", section), f"{title}: no commit"
            assert "python bench/" in section, f"{title}: no command"
