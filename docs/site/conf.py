"""Settings of the documentation as a site: `make docs` builds it into build/docs, without the network.

The source folder is the repository itself, so every relative link of a page works here as it does on GitHub. A
link to a file of code leads to a page with that file. The table of contents is made of the links of a few pages.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
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
html_show_search_summary = False  # it fetches each page, which a browser forbids where the site is opened as files
highlight_language = "text"
smartquotes = False  # curly quotes and a dash in place of -- are wrong where somebody copies them
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

LESSONS = "docs/learn/index"
PARENTS = ("docs/index", LESSONS, "src/potluck/troubleshooting/index")
"""The pages whose links are the table of contents."""
FRONT = '<!doctype html><title>Potluck</title><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}


class Console(RegexLexer):
    """Commands after `$ `, and their output, which is no shell."""

    name = "console"
    tokens = {"root": [(r"\$ (?:.*\\\n)*.*\n", Generic.Strong), (r".*\n", Generic.Output)]}  # noqa: RUF012


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """Appends to a page the table of contents that its links amount to, under the bold words before them.

    The words of a link are its name there: they are shorter than the page's title. Lessons keep their titles, which
    have numbers, and so does what a link names as a part of a sentence.
    """
    if page not in PARENTS:
        return
    found: dict[str, dict[str, str]] = {"": {}}
    caption = ""
    for line in source[0].splitlines():
        if heading := re.match(r"\*\*([\w ]+)\*\*", line):
            caption = heading[1]
        found.setdefault(caption, {})
        for words, link in re.findall(r"\[([^]`]+)\]\(([\w./-]+)\.md\)", line):
            if not any(link in links for links in found.values()) and (page == root_doc or "/" not in link):
                found[caption][link] = words[0].upper() + words[1:] if page == root_doc else words
    for caption, links in found.items():
        named = f":caption: {caption}\n" if caption else ""
        titled = [page == LESSONS or (words.islower() and " " in words) for words in links.values()]
        lines = [link if own else f"{links[link]} <{link}>" for link, own in zip(links, titled, strict=True)]
        source[0] += "\n\n```{toctree}\n:hidden:\n" + named + "\n" + "\n".join(lines) + "\n```\n"


# -- narrow screens -------------------------------------------------------------------------------------


KINDS = (
    (160, "paragraphs", 13.0),
    (60, "sentences", 13.0),
    (24, "words", 8.0),
    (12, "phrases", 5.5),
    (0, "figures", 0.0),
)
"""Classes of columns by their longest text, in letters, and the room that each needs, in em."""
LETTER_EM, MARGINS_EM, PHONE_EM = 0.6, 1.2, 24.0


def size_columns(app: Any, tree: nodes.document, page: str) -> None:
    """Names a column after the length of its texts, for the style sheet: what is long needs room for some words.

    Where three columns or more have no room on a phone and one of them is a text, each row becomes a card there, in
    which every cell has its column's heading. Of numbers one wants to see the columns.
    """
    for table in tree.findall(nodes.table):
        headings = [entry for head in table.findall(nodes.thead) for entry in head.findall(nodes.entry)]
        body = [list(row.findall(nodes.entry)) for row in next(table.findall(nodes.tbody)).findall(nodes.row)]
        room_em, has_text = 0.0, False
        for heading, *column in zip(headings, *body, strict=True):
            texts = [entry.astext() for entry in column]
            _, kind, least_em = next(found for found in KINDS if found[0] < max(map(len, texts)) or not found[0])
            word = max((len(word) for text in texts for word in text.split()), default=0)
            room_em += max(least_em, min(word, LONG_WORD) * LETTER_EM + MARGINS_EM)
            has_text |= kind in ("paragraphs", "sentences", "words")
            for entry in (heading, *column):
                entry["classes"].append(kind)
        if len(headings) > 2 and room_em > PHONE_EM and has_text:
            table["classes"].append("cards")
            for row in body:
                for heading, entry in list(zip(headings, row, strict=True))[1:]:
                    if heading.astext() and entry.astext():
                        words = [child.deepcopy() for part in heading.children for child in part.children]
                        entry.insert(0, nodes.paragraph("", "", *words, classes=["heading"]))


def link_pictures(app: Any, tree: nodes.document, page: str) -> None:
    """A picture that is small on a phone opens as a whole when it is touched."""
    for image in list(tree.findall(nodes.image)):
        if not isinstance(image.parent, nodes.reference):
            name = f"_images/{app.env.images[image['uri']][1]}"
            link = nodes.reference(
                "", "", refuri=posixpath.relpath(name, posixpath.dirname(page) or "."), internal=True
            )
            image.replace_self(link)
            link += image


LONG_WORD, LONGEST_WORD = 25, 44
"""Letters of code that are wider than a column of a phone, and of a screen."""


def break_long_code(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Code in a sentence is never broken, but for a word wider than a column: that breaks after punctuation."""

    def broken(word: re.Match[str]) -> str:
        size = len(html.unescape(word[1]))
        if size < LONG_WORD:
            return word[0]
        parts = re.sub(r"((?:&\w+;|[/._,(\[|=-])+)(?=[^\s])", r"\1<wbr>", word[1])
        return f'<span class="pre {"long" if size < LONGEST_WORD else "longest"}">{parts}</span>'

    context["body"] = re.sub(r'<span class="pre">([^<]{20,})</span>', broken, context.get("body", ""))


# -- files of code as pages -----------------------------------------------------------------------------


def show_code(app: Any, tree: nodes.document, page: str) -> None:
    """Links to files lead to pages with their text, not to downloads."""
    for link in list(tree.findall(addnodes.download_reference)):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["reftarget"]))
        app.env.potluck_code = {*getattr(app.env, "potluck_code", ()), name}
        target = posixpath.relpath(f"{name}.html", posixpath.dirname(page) or ".")
        link.replace_self(nodes.reference("", "", *link.children, refuri=target, internal=True))


def markdown(text: str) -> str:
    """A notebook's text. Its heading is below that of the page."""
    return str(MarkdownIt().render(re.sub(r"^#", "##", text, flags=re.M)))


def code_pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    for name in sorted(getattr(app.env, "potluck_code", ())):
        text = (ROOT / name).read_text(encoding="utf-8")
        show = app.builder.highlighter.highlight_block
        if name.endswith(".ipynb"):
            cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
            shown = "".join(show(cell, "python") if kind == "code" else markdown(cell) for cell, kind in cells)
        else:
            shown = show(text, LANGUAGES.get(Path(name).suffix, "text"))
        title = html.escape(name)
        heading = re.sub(r"([/_])", r"\1<wbr>", title)
        yield name, {"title": title, "body": f"<h1>{heading}</h1>\n{shown}"}, "page.html"


def write_front(app: Any, failure: Exception | None) -> None:
    """The site begins at docs/index.html."""
    if failure is None:
        Path(app.outdir, "index.html").write_text(FRONT, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.add_lexer("console", Console)
    app.connect("source-read", add_contents)
    app.connect("doctree-resolved", show_code)
    app.connect("doctree-resolved", size_columns)
    app.connect("doctree-resolved", link_pictures)
    app.connect("html-page-context", break_long_code)
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", write_front)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
