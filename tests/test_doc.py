"""Every Python block runs: of the documentation, in the order of the page, and of README."""

import os
import re
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parents[1]
DOC = ROOT / "doc"
BLOCK = re.compile(r"^( *)\.\. code-block:: python\n\n((?:(?:\1   .*)?\n)+)", re.MULTILINE)
FENCED = re.compile(r"^()```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, pattern=BLOCK):
    """Line numbers and sources of a page's Python blocks."""
    text = page.read_text(encoding="utf-8") + "\n"
    for found in pattern.finditer(text):
        yield text.count("\n", 0, found.start(2)), textwrap.dedent(found[2])


def pages():
    """Pages with blocks; those of the methods fit more rows, and are slow."""
    for path in sorted(DOC.rglob("*.rst")):
        page = path.relative_to(DOC)
        if page.parts[0] not in ("_build", "api", "auto_examples") and any(blocks(path)):
            marks = [pytest.mark.slow] if page.parts[0] == "methods" else []
            yield pytest.param(page, marks=marks, id=str(page))


def readme():
    """Blocks of README; that of ten digits fits more, and is slow."""
    for line, source in blocks(ROOT / "README.md", FENCED):
        marks = [pytest.mark.slow] if "load_digits" in source else []
        yield pytest.param(line, source, marks=marks, id=f"line {line}")


def run(page, found, folder, monkeypatch):
    """Run blocks in one name space, in a folder of their own."""
    monkeypatch.chdir(folder)
    with matplotlib.rc_context({"backend": "agg"}):
        names = {"__name__": "page"}
        for line, source in found:
            exec(compile("\n" * line + source, os.fspath(page), "exec"), names)
        plt.close("all")


@pytest.mark.parametrize("page", list(pages()))
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    run(DOC / page, blocks(DOC / page), tmp_path, monkeypatch)


@pytest.mark.parametrize(("line", "source"), list(readme()))
def test_a_block_of_readme_runs_by_itself(line, source, tmp_path, monkeypatch):
    run(ROOT / "README.md", [(line, source)], tmp_path, monkeypatch)


TABLE = re.compile(r"^(=+ +=[= ]*)\n(.*?)^\1$(?=\n\n|\n*\Z)", re.MULTILINE | re.DOTALL)


def test_rows_of_simple_tables_are_whole():
    """A line that begins in the first column is a row of its own, and not the rest of one."""
    pages = [path for path in DOC.glob("[!a_]*/*.rst")] + list(DOC.glob("*.rst"))
    lines = [
        f"{path.name}: {line}"
        for path in pages
        for found in TABLE.finditer(path.read_text(encoding="utf-8"))
        for line in found[2].splitlines()
        if line.strip() and line[0] not in " =-" and not line[found[1].index(" ") :].strip()
    ]
    assert lines == []


NAMED = re.compile(r"``((?:skgp|tests|examples)/[\w/]+(?:\.py)?)``(?::\s+``([\w.]+)``)?")


def test_code_that_pages_name_is_there():
    """Files, and what is said to be in one: "``file``: ``name``"."""
    lost = []
    for page in sorted(DOC.glob("[!a_]*/*.rst")):
        for file, name in NAMED.findall(page.read_text(encoding="utf-8")):
            path = ROOT / file
            files = [path] if path.is_file() else path.glob("*.py")
            text = "".join(each.read_text(encoding="utf-8") for each in files)
            known = set(re.findall(r"\w+", text)) if path.exists() else set()
            lost += [(page.name, file, name)] * (not {*re.findall(r"\w+", name)} < known)
    assert lost == []
