"""Every Python block of the documentation runs, page by page, in the order in which a reader meets them."""

import re
import textwrap
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.rst") if not {"_build", "gallery", "generated"} & set(p.parts))


def blocks(text):
    """The bodies of `.. code-block:: python` directives."""
    found = re.finditer(r"^( *)\.\. code-block:: python\n((?:\1 +:.*\n)*)\n((?:\1 {3,}.*\n|\s*\n)+)", text, re.M)
    return [textwrap.dedent(match[3]) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_page_runs(page, tmp_path, monkeypatch):
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for number, block in enumerate(blocks(page.read_text(encoding="utf-8") + "\n")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_blocks_are_found():
    text = "Text\n\n.. code-block:: python\n\n   a = 1\n\n   b = a\n\nMore\n\n.. code-block:: console\n\n   $ ls\n\n"
    assert blocks(text) == ["a = 1\n\nb = a\n\n"]
