"""`potluck explain CODE`: prints the troubleshooting page of an error from the installed package."""

from __future__ import annotations

import re
import sys
from importlib import resources

import click

from potluck.checked import did_you_mean
from potluck.errors import UserError

_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_WIDEST = 100


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain an error: what it means, why it happens and what to do. CODE is in the error's last line.

    \b
    Examples:
      potluck explain                list all codes
      potluck explain bad-token      show the page of one code
      potluck explain doctor         list all findings of `potluck doctor`
    """
    pages = _pages()
    if code is None:
        width = max(map(len, pages))
        for name, text in pages.items():
            click.echo(f"{name:<{width}}  {_about(text)}")
        click.echo("\n`potluck explain CODE` shows one page.", err=True)
        return
    wanted = code.strip().lower().removesuffix(".md").rpartition("/")[2]
    if wanted not in pages:
        close = did_you_mean(wanted, list(pages))
        raise UserError(f"there is no page {code!r}", hint=f"{close}`potluck explain` lists all codes")
    _show(_without_links(pages[wanted], pages))


def _pages() -> dict[str, str]:
    """Each page's text by its code."""
    folder = resources.files("potluck") / "troubleshooting"
    found = {p.name.removesuffix(".md"): p for p in folder.iterdir() if p.name.endswith(".md")}
    return {code: found[code].read_text(encoding="utf-8") for code in sorted(found) if code != "index"}


def _about(text: str) -> str:
    """The page's title without its code."""
    return text.partition("\n")[0].partition(": ")[2]


def _without_links(text: str, pages: dict[str, str]) -> str:
    """Turn links to other pages into their command, and drop links to files that are not installed."""

    def words(match: re.Match[str]) -> str:
        page = match[2].removesuffix(".md")
        return f"{match[1]} (`potluck explain {page}`)" if page in pages else match[1]

    return _LINK.sub(words, text)


def _show(text: str) -> None:
    """Print Markdown rendered on a terminal, and unchanged in a pipe."""
    if not sys.stdout.isatty():
        from potluck.report.text import fitted

        click.echo(fitted(text.rstrip(), sys.stdout))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(file=sys.stdout)
    console.print(Markdown(text), width=min(console.width, _WIDEST))
