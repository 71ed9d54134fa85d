"""Settings of the documentation as a site: `make docs` builds it into build/docs, without the network.

The source folder is the repository itself, so every relative link of a page works here as it does on GitHub. A
link to a file of code leads to a page with that file. The table of contents is made of the links of a few pages.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexer import RegexLexer
from pygments.token import Generic
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[2]

project = "Potluck"
author = "the Potluck authors"
copyright = "the Potluck authors, Apache-2.0"

root_doc = "docs/index"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("docs/*.md", "docs/**/*.md", "src/potluck/troubleshooting/*.md"),
]
exclude_patterns = [".*", "bench", "build", "examples", "runs", "tests", "**/__pycache__"]  # not even looked into
extensions = ["myst_parser", "sphinx_copybutton"]
nitpicky = True
suppress_warnings = ["myst.header"]  # generated tables may skip a level of headings
myst_heading_anchors = 4  # as GitHub gives them

html_theme = "furo"
html_title = "Potluck"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_use_index = False
highlight_language = "text"
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

PARENTS = ("docs/index", "docs/learn/index", "src/potluck/troubleshooting/index")
"""The pages whose links are the table of contents."""
FRONT = '<!doctype html><title>Potluck</title><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash", ".ipynb": "json"}


class Console(RegexLexer):
    """Commands after `$ `, and their output, which is no shell."""

    name = "console"
    tokens = {"root": [(r"\$ (?:.*\\\n)*.*\n", Generic.Strong), (r".*\n", Generic.Output)]}  # noqa: RUF012


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """Appends to a page the table of contents that its links amount to, under the bold words before them."""
    if page not in PARENTS:
        return
    found: dict[str, list[str]] = {"": []}
    caption = ""
    for line in source[0].splitlines():
        if heading := re.match(r"\*\*([\w ]+)\*\*", line):
            caption = heading[1]
        found.setdefault(caption, [])
        for link in re.findall(r"\]\(([\w./-]+)\.md\)", line):
            if not any(link in links for links in found.values()) and (page == root_doc or "/" not in link):
                found[caption].append(link)
    for caption, links in found.items():
        named = f":caption: {caption}\n" if caption else ""
        source[0] += "\n\n```{toctree}\n:hidden:\n" + named + "\n" + "\n".join(links) + "\n```\n"


# -- files of code as pages -----------------------------------------------------------------------------


def show_code(app: Any, tree: nodes.document, page: str) -> None:
    """Links to files lead to pages with their text, not to downloads."""
    for link in list(tree.findall(addnodes.download_reference)):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["reftarget"]))
        app.env.potluck_code = {*getattr(app.env, "potluck_code", ()), name}
        target = posixpath.relpath(f"{name}.html", posixpath.dirname(page) or ".")
        link.replace_self(nodes.reference("", "", *link.children, refuri=target, internal=True))


def code_pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    for name in sorted(getattr(app.env, "potluck_code", ())):
        text = (ROOT / name).read_text(encoding="utf-8")
        shown = app.builder.highlighter.highlight_block(text, LANGUAGES.get(Path(name).suffix, "text"))
        title = html.escape(name)
        yield name, {"title": title, "body": f"<h1>{title}</h1>\n{shown}"}, "page.html"


def write_front(app: Any, failure: Exception | None) -> None:
    """The site begins at docs/index.html."""
    if failure is None:
        Path(app.outdir, "index.html").write_text(FRONT, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.add_lexer("console", Console)
    app.connect("source-read", add_contents)
    app.connect("doctree-resolved", show_code)
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", write_front)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
