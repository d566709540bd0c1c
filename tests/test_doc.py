"""Every Python block of the documentation runs, page by page, in the order of the page."""

import os
import re
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

DOC = Path(__file__).parents[1] / "doc"
BLOCK = re.compile(r"^( *)\.\. code-block:: python\n\n((?:(?:\1   .*)?\n)+)", re.MULTILINE)


def blocks(page):
    """Line numbers and sources of a page's Python blocks."""
    text = page.read_text(encoding="utf-8") + "\n"
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start(2)), textwrap.dedent(found[2])


def pages():
    """Pages with blocks; those of the methods fit more rows, and are slow."""
    for path in sorted(DOC.rglob("*.rst")):
        page = path.relative_to(DOC)
        if page.parts[0] not in ("_build", "api", "auto_examples") and any(blocks(path)):
            marks = [pytest.mark.slow] if page.parts[0] == "methods" else []
            yield pytest.param(page, marks=marks, id=str(page))


@pytest.mark.parametrize("page", list(pages()))
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context({"backend": "agg"}):
        names = {"__name__": "page"}
        for line, source in blocks(DOC / page):
            code = compile("\n" * line + source, os.fspath(DOC / page), "exec")
            exec(code, names)
        plt.close("all")
