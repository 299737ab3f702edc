"""The repository's documents, read as Markdown: code blocks, code spans, links and headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = tuple(sorted((ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
                          *(ROOT / "docs").glob("*.md"))))
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
PROGRAMS = ("python", "jaxpaged", "make", "pip", "curl")


@dataclass(frozen=True, slots=True)
class Document:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path inside the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text()

    @property
    def prose(self) -> str:
        """All of it but the code blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str | None = None) -> list[tuple[str, str]]:
        """Language and content of each code block, or of those in one language."""
        return [(found[1], found[2]) for found in _FENCE.finditer(self.text) if language in (None, found[1])]

    def spans(self) -> list[str]:
        """Texts between backticks in the prose."""
        return [" ".join(span.split()) for span in _SPAN.findall(self.prose)]

    def commands(self) -> Iterator[str]:
        """Each command of its `sh` blocks and code spans, on one line and without its comment."""
        for _, block in self.blocks("sh"):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                if command := re.sub(r"(^|\s+)#.*$", "", line).strip():
                    yield command
        yield from (span for span in self.spans() if span.startswith(tuple(f"{name} " for name in PROGRAMS)))

    def links(self) -> list[str]:
        """Targets of its links."""
        return _LINK.findall(self.prose)

    def anchors(self) -> set[str]:
        """Anchors of its headings, as GitHub makes them."""
        titles = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(self.prose))
        return {title.replace(" ", "-") for title in titles}


def documents() -> tuple[Document, ...]:
    """All of them."""
    return tuple(map(Document, DOCUMENTS))
