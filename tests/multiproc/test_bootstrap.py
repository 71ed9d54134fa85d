"""What is installed on a machine: once, also when two ask at the same time; complete, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from potluck.fleet import agent, bootstrap, installer
from potluck.fleet.remote import words_of
from potluck.spec.agent_reports import RemoteFacts
from potluck.spec.fleet_file import NamedMachine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="machines of a fleet are POSIX systems")


def plan_in(folder: Path, **changed: Any) -> dict[str, Any]:
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    (cache / f"{bootstrap.code_name()}.whl").write_bytes(bootstrap.wheel())
    plan = {
        "cache": str(cache),
        "code": bootstrap.code_name(),
        "env": str(cache / "env-x-py3"),
        "make_env": True,
        "uv": "",
        "requirements": ["tiny-thing>=1"],
        "pins": ["tiny-thing==1.0"],
        "modules": ["tiny_thing"],
    }
    return {**plan, **changed}


def installing(plan: dict[str, Any], folder: Path, python: str = sys.executable) -> subprocess.Popen[str]:
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}
    command = [python, *words_of(installer, plan)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tiny_wheel(folder: Path, version: str) -> None:
    info = f"tiny_thing-{version}.dist-info"
    with zipfile.ZipFile(folder / f"tiny_thing-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-thing\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_thing.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.slow
def test_two_at_once_make_one_environment_with_the_hosts_versions(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        tiny_wheel(tmp_path, version)
    plan = plan_in(tmp_path)
    both = [installing(plan, tmp_path) for _ in range(2)]
    texts = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    assert sorted("installed in" in text for text in texts) == [False, True], texts
    python, code = Path(plan["env"]) / "bin" / "python", Path(plan["cache"]) / plan["code"]
    shown = subprocess.run(
        [python, "-c", "import tiny_thing, potluck; print(tiny_thing.version, potluck.__file__)"],
        env={"PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split() == ["1.0", str(code / "potluck" / "__init__.py")], shown.stderr
    assert not list(Path(plan["cache"]).glob("*.whl"))


def other_pythons() -> list[str]:
    """An interpreter of each other version that fits, where there are any."""
    places = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = []
    for minor in range(11, 16):
        named = [f"{place}/python3.{minor}" for place in places if minor != sys.version_info[1]]
        # pyenv's shims are there also for versions that it does not offer.
        works = (p for p in named if os.access(p, os.X_OK) and not subprocess.run([p, "-V"]).returncode)
        found += [python for python in (next(works, None),) if python]
    return found


def test_other_versions_of_python_are_looked_at_and_installed_into(tmp_path: Path) -> None:
    others = other_pythons()
    if not others:
        pytest.skip("there is only one Python that is new enough")
    tiny_wheel(tmp_path, "1.0")
    needs = bootstrap.FleetNeeds(imports={}).of(NamedMachine(cache=str(tmp_path / "none")))
    for python in others:
        looked = subprocess.run([python, *words_of(agent, needs)], input="", capture_output=True, text=True)
        facts = RemoteFacts(**json.loads(looked.stdout.removeprefix(agent.HELLO)))
        assert python.rpartition("python")[2] in facts.python
        assert facts.env.endswith(f"-py{python.rpartition('python')[2]}")
    plan = plan_in(tmp_path)
    process = installing(plan, tmp_path, others[-1])
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    shown = [Path(plan["env"]) / "bin" / "python", "-c", "import tiny_thing; print(tiny_thing.version)"]
    assert subprocess.run(shown, capture_output=True, text=True).stdout == "1.0\n"


UV = """#!/bin/sh
# Stands for uv: makes an environment of this Python, and installs only what `allowed` allows.
if [ "$1" = venv ]; then
    for env; do :; done
    mkdir -p "$env/bin" && ln -s {python} "$env/bin/python"
    exit
fi
echo "$@" >> {folder}/asked
env > {folder}/variables
case "$*" in *" -c "*) exit {with_pins} ;; esac
exit {without}
"""


def with_uv(folder: Path, with_pins: int, without: int, module: str) -> tuple[int, str, Path]:
    uv = folder / "uv"
    uv.write_text(UV.format(python=sys.executable, folder=folder, with_pins=with_pins, without=without))
    uv.chmod(0o755)
    plan = plan_in(folder, uv=str(uv), modules=[module], pins=["tiny-thing==1.0", "torch==2.13.0"])
    process = installing(plan, folder)
    text = process.communicate(timeout=60)[0]
    return process.returncode, text, Path(plan["env"]) / "ready"


def test_a_machine_without_uv_fetches_it_and_gives_it_the_settings_of_pip(tmp_path: Path) -> None:
    script = UV.format(python=sys.executable, folder=tmp_path, with_pins=0, without=0)
    with zipfile.ZipFile(tmp_path / "uv-1.0-py3-none-any.whl", "w") as wheel:
        info = "uv-1.0.dist-info"
        program = zipfile.ZipInfo("uv-1.0.data/scripts/uv")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, script)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"uv-1.0.data/scripts/uv,,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    plan = plan_in(tmp_path, modules=["json"])
    process = installing(plan, tmp_path)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "first import" in text
    asked = (tmp_path / "asked").read_text()
    assert f"--python {plan['env']}/bin/python" in asked
    assert f"--find-links {tmp_path} --no-index" in asked
    assert asked.count("\n") == 1
    listed = (
        "global.index-url='https://a/'\nglobal.extra-index-url='https://b\\nhttps://c'\n:env:.index-url='https://d'\n"
        "global.cert='/etc/our-ca.pem'\nglobal.proxy='http://p:1'\ninstall.trusted-host='e f'"
    )
    words, variables = installer._settings(listed)
    settings = ["--extra-index-url", "https://b", "--extra-index-url", "https://c"]
    hosts = ["--allow-insecure-host", "e", "--allow-insecure-host", "f"]
    assert words[2:] == [*settings, *hosts, "--index-url", "https://d"]
    assert variables["SSL_CERT_FILE"] == "/etc/our-ca.pem"
    assert variables["HTTP_PROXY"] == variables["HTTPS_PROXY"] == "http://p:1"
    # Without a certificate of its own, pip takes the system's; uv by itself only those that it brings.
    assert installer._settings("")[1] == {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
    assert "UV_SYSTEM_CERTS=1" in (tmp_path / "variables").read_text()


def test_versions_that_do_not_exist_there_are_left_to_the_installer(tmp_path: Path) -> None:
    status, text, ready = with_uv(tmp_path, 1, 0, "json")
    assert status == 0, text
    assert "trying with torch==2.13.0" in text
    assert "trying with the newest that fit" in text
    assert json.loads(ready.read_text())["requirements"] == ["tiny-thing>=1"]
    assert len((tmp_path / "asked").read_text().splitlines()) == 3


@pytest.mark.parametrize(("without", "module"), [(1, "json"), (0, "no_such_module_there")])
def test_what_is_not_complete_is_not_taken_for_ready(tmp_path: Path, without: int, module: str) -> None:
    status, _, ready = with_uv(tmp_path, 1, without, module)
    assert status == 1
    assert not ready.exists()
