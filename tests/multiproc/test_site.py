"""The documentation as a site: it builds without a warning, has no dead link, and fetches nothing from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sphinx", reason='needs pip install -e ".[docs]"')
pytest.importorskip("furo", reason='needs pip install -e ".[docs]"')
LIMIT_S = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"-m sphinx (.*) -d build/doctrees \. build/docs$", makefile, re.M)
    folder = tmp_path_factory.mktemp("site")
    places = ["-d", str(folder / "trees"), ".", str(folder / "docs")]
    command = [sys.executable, "-m", "sphinx", *arguments.split(), *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "docs"


def test_every_link_and_picture_is_there(site: Path) -> None:
    """Those of pages, and those of raw HTML, which Sphinx does not look at."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) > 80
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    lost = []
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            if re.match(r"\w+:", link):
                continue
            name, anchor = urldefrag(link)
            target = (page.parent / unquote(name.partition("?")[0])).resolve() if name else page
            if not target.is_file() or (anchor and target.suffix == ".html" and unquote(anchor) not in ids[target]):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert not lost


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?:https?:)?//')
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert not [path.name for path in files if fetched.search(path.read_text(encoding="utf-8"))]


def test_the_search_finds_a_lesson(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    in_titles, in_texts = (found[kind]["straggler"] for kind in ("titleterms", "terms"))
    assert found["docnames"].index("docs/learn/6-stragglers") in np.atleast_1d(in_titles)
    assert found["docnames"].index("docs/learn/5-bandwidth") in np.atleast_1d(in_texts)


def test_no_line_is_lost_as_a_comment() -> None:
    """A line that begins with % is text on GitHub, and a comment for the site."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    lost = re.compile(r"^\s*%", re.M)
    assert not [str(page.relative_to(ROOT)) for page in pages if lost.search(page.read_text(encoding="utf-8"))]


def test_the_search_works_on_files(site: Path) -> None:
    """Summaries would be fetched, page by page: an error for each result where nobody serves the site."""
    options = (site / "_static" / "documentation_options.js").read_text(encoding="utf-8")
    assert "SHOW_SEARCH_SUMMARY: false" in options


def test_code_wider_than_a_column_may_break_and_no_other(site: Path) -> None:
    page = (site / "docs" / "reference" / "cli.html").read_text(encoding="utf-8")
    assert '<span class="pre">--checkpoint-every</span>' in page
    assert "<wbr>latency_<wbr>ms" in page
    assert re.search(r'<td class="[^"]*\bsentences\b', page)


def test_a_table_that_names_of_code_make_too_wide_for_a_phone_becomes_cards(site: Path) -> None:
    """Code of 18 letters does not wrap: two columns of sentences beside it have no room in 380 pixels."""
    page = (site / "docs" / "learn" / "7-things-break.html").read_text(encoding="utf-8")
    (table,) = re.findall(r"<table class=[^>]*>(?:(?!</table>).)*symptom.*?</table>", page, re.S)
    assert "NCCL_SOCKET_IFNAME" in table
    assert re.match(r'<table class="[^"]*\bcards\b', table)


def test_every_page_is_in_the_contents(site: Path) -> None:
    """Sphinx warns of pages that are in no table of contents; this is for those that it was not told of."""
    pages = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if not (site / page).with_suffix(".html").exists()]
    front = (site / "docs" / "index.html").read_text(encoding="utf-8")
    assert "Two machines" in front
    assert "Lessons" in front
