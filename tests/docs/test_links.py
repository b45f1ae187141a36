"""Links between documents lead somewhere, and every document can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import links_of

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def _anchors(document: Path) -> set[str]:
    """Headings as their anchors: lower case, punctuation gone, blanks as hyphens."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document):
    for link in links_of(document):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name} links to {link}"
        assert target.is_relative_to(REPOSITORY), f"{document.name} links outside: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{document.name} links to {link}"


def test_every_document_is_reached_from_the_readme():
    seen, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        document = waiting.pop()
        if document in seen:
            continue
        seen.add(document)
        for link in links_of(document):
            target = (document.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file():
                waiting.append(target)
    assert set(DOCUMENTS) <= seen
