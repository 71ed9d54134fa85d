"""A guest that lacks what the host's script imports says so before it runs it, and the host hears it."""

from __future__ import annotations

from pathlib import Path

from support.fleet import JOB, Fleet


def test_a_guest_without_a_module_names_it_and_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_on_the_host.py").write_text("")
    script, until = tmp_path / "job.py", tmp_path / "until"
    first = "from __future__ import annotations\n"
    # The guest looks before the script runs there, and so before it could find what lies elsewhere.
    there = f"import sys\nsys.path.append({str(tmp_path / 'elsewhere')!r})\nimport only_on_the_host\n"
    script.write_text(first + there + JOB.read_text().replace(first, ""))
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(script, arguments=["--until", until])
        ann = fleet.guest("ann")
        ann.exits_with(2, deadline_s=40)
        until.touch()
        host.succeeds(deadline_s=20)
        assert "error: this machine lacks what job.py imports: only_on_the_host\n" in ann.stderr()
        assert "hint: pip install only_on_the_host   (on this machine)" in ann.stderr()
        assert "data set" not in ann.stderr()
        assert "Traceback" not in ann.stderr()
        assert "bug report" not in ann.stdout() + ann.stderr()  # it is no bug
        (left,) = fleet.events("guest_left", "ann")
        assert "lacks what job.py imports: only_on_the_host" in left["reason"]
