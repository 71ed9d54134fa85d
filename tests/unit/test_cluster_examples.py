"""The files in examples/cluster: what they call exists, and the manifest is one that Kubernetes would take."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from potluck.cli.host import host
from potluck.cli.join import join

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
VERBS: dict[str, click.Command] = {"host": host, "join": join}


def assert_parses(words: list[str]) -> dict[str, Any]:
    """A potluck command line as the verb's own parser takes it."""
    assert words[0] == "potluck"
    with VERBS[words[1]].make_context(words[1], list(words[2:])) as context:
        return dict(context.params)


def documents() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return {f"{d['kind']}/{d['metadata']['name']}": d for d in yaml.safe_load_all(manifest().read_text()) if d}


def manifest() -> Path:
    return CLUSTER / "kubernetes.yaml"


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sbatch"])
def test_batch_scripts_are_bash_and_are_named_in_the_guide(name: str) -> None:
    if shutil.which("bash"):
        done = subprocess.run(["bash", "-n", str(CLUSTER / name)], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
    assert f"examples/cluster/{name}" in (ROOT / "docs" / "guides" / "clusters.md").read_text()


def test_the_commands_of_the_batch_script_have_these_options() -> None:
    text = (CLUSTER / "slurm.sbatch").read_text()
    found = re.findall(r"^ +(potluck (?:host|join) .*?) &$", text, re.MULTILINE)
    assert len(found) == 2
    parsed = [assert_parses(shlex.split(words.replace("$@", "my_train.py"))) for words in found]
    assert parsed[0]["token_file"] == parsed[1]["token_file"] == Path("$token")
    assert parsed[1]["wait_s"] == 600


def test_the_manifest_has_what_its_parts_need_of_each_other() -> None:
    found = documents()
    assert set(found) == {
        "Job/potluck-host",
        "Job/potluck-guests",
        "PersistentVolumeClaim/potluck-runs",
        "NetworkPolicy/potluck-host",
        "NetworkPolicy/potluck-guests",
    }
    pods = {name: found[f"Job/potluck-{name}"]["spec"]["template"] for name in ("host", "guests")}
    (at_host,) = pods["host"]["spec"]["containers"]
    (at_guest,) = pods["guests"]["spec"]["containers"]
    of_host = assert_parses([*at_host["command"], *at_host["args"]])
    of_guest = assert_parses([*at_guest["command"], *at_guest["args"]])
    # The file that the host writes is the one that its probe looks for, and that the guide tells to read.
    assert at_host["readinessProbe"]["exec"]["command"][-1] == str(of_host["token_file"])
    assert f"cat {of_host['token_file']}" in manifest().read_text()
    assert f"cat {of_host['token_file']}" in (ROOT / "docs" / "guides" / "clusters.md").read_text()
    # The guests' token is the Secret's key `token`, at the place that they read.
    (volume,) = pods["guests"]["spec"]["volumes"]
    (mount,) = at_guest["volumeMounts"]
    assert volume["name"] == mount["name"]
    assert volume["secret"]["secretName"] == "potluck-token"
    assert str(of_guest["token_file"]) == f"{mount['mountPath']}/token"
    for pod in pods.values():
        inside = pod["spec"]
        assert inside["restartPolicy"] in ("Never", "OnFailure")  # a Job takes no other
        names = {v["name"] for v in inside["volumes"]}
        assert {m["name"] for c in inside["containers"] for m in c["volumeMounts"]} == names
        assert not inside["automountServiceAccountToken"]
    (rule,) = found["NetworkPolicy/potluck-host"]["spec"]["ingress"]
    (port,) = rule["ports"]
    assert port["port"] == of_host["port"] == at_host["ports"][0]["containerPort"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= pods["guests"]["metadata"]["labels"].items()
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in pods["host"]["spec"]["volumes"] if "emptyDir" not in v
    ]
    assert claims == ["potluck-runs"]


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_the_manifest_fits_the_schemas_of_kubernetes(version: str) -> None:
    """Where that library is installed: with its schemas it is 100 MB, and no part of `make test`."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents().values():
        kubernetes_validate.validate(document, version, strict=True)
    broken = documents()["Job/potluck-host"]
    broken["spec"]["templates"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)
