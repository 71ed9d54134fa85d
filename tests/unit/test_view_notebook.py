"""The view in a notebook: one display, updated at most twice a second, and its last state stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from potluck.report.notebook_view import NotebookView
from potluck.report.view import PlainView, make_view
from support import sample_events as sample

display = pytest.importorskip("IPython.display", reason="notebooks have IPython")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was displayed, then each update of it."""
    texts: list[str] = []

    def publish(bundle: dict[str, str], **options: Any) -> Any:
        assert options == {"raw": True, "display_id": True}
        texts.append(bundle["text/plain"])
        return SimpleNamespace(update=lambda bundle, raw: texts.append(bundle["text/plain"]))

    monkeypatch.setattr(display, "display", publish)
    return texts


def test_one_display_is_updated_in_place(shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    view = NotebookView(lambda: now)
    view.event(sample.news()[0])
    assert shown == []
    assert capsys.readouterr().out.strip(), "before the training there is only text"
    view.event(sample.run_start())
    view.event(sample.step(1))
    assert len(shown) == 1, "not more often than a person reads"
    now = 0.6
    view.event(sample.step(2))
    assert len(shown) == 2
    assert "2/4" in shown[1]
    view.event(sample.step(3))
    view.close()
    view.close()
    view.event(sample.step(4))
    assert len(shown) == 3
    assert "3/4" in shown[2], "the last state stays"
    assert "\x1b" not in shown[2]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython

    assert isinstance(make_view(), PlainView)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())  # a terminal
    assert isinstance(make_view(), PlainView)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert isinstance(make_view(), NotebookView)
