"""Checks of what is installed on one machine: torch and its GPU, MPS, the operating system. PURE."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from potluck.spec.facts import Case, Facts
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding, Fine


def versions(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    if facts.torch.version is None:
        yield Finding(
            code="no-torch",
            severity=BLOCKER,
            machine=facts.name,
            what="torch cannot be found" + (f": {facts.torch.error}" if facts.torch.error else ""),
            how=f"looked for it in Python {facts.python}",
            breaks="nothing can be trained here",
            fix="pip install torch",
            pains=(22,),
        )
        return
    words = f"potluck {facts.potluck}, torch {facts.torch.version}, Python {facts.python}"
    yield Fine(machine=facts.name, what=words, details=f"{facts.system} {facts.architecture}".strip())


def gpu(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """A GPU with a driver, but a torch that cannot use it."""
    torch = facts.torch
    if torch.version is None:
        return
    for card in facts.gpus:
        name = card.name or f"an {card.vendor.upper()} GPU"
        build = {"nvidia": torch.cuda_build, "amd": torch.hip_build}.get(card.vendor)
        if card.vendor not in ("nvidia", "amd"):
            continue
        kind = "CUDA" if card.vendor == "nvidia" else "ROCm"
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        if hidden in ("", "-1"):
            yield Finding(
                code="gpu-hidden",
                severity=WARNING,
                machine=facts.name,
                what=f"{name} is there, but CUDA_VISIBLE_DEVICES={hidden} hides it",
                how="the variable is set here",
                breaks="training runs on the CPU, some 10 to 100 times slower",
                fix="unset CUDA_VISIBLE_DEVICES",
            )
        elif build is None:
            yield Finding(
                code="torch-without-gpu",
                severity=WARNING,
                machine=facts.name,
                what=f"{name} is there (driver {card.driver or '?'}), but this torch is built without {kind}",
                how=f"{card.how}; torch {torch.version} names no {kind}",
                breaks="training runs on the CPU, some 10 to 100 times slower",
                fix=f"pip install --force-reinstall torch   (the {kind} build: "
                "https://pytorch.org/get-started/locally)",
            )
        elif torch.cuda_available is False:
            yield Finding(
                code="gpu-not-usable",
                severity=WARNING,
                machine=facts.name,
                what=f"{name} is there and torch is built for {kind} {build}, but cannot use it",
                how=f"torch.cuda.is_available() is False; driver {card.driver or '?'} ({card.how})",
                breaks="training runs on the CPU, some 10 to 100 times slower",
                fix=f"update the driver to one for {kind} {build}, then: nvidia-smi",
            )
        else:
            yield Fine(
                machine=facts.name, what=f"GPU: {name}, driver {card.driver or '?'}, torch for {kind} {build}"
            )


def mps(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """The GPU of a Mac (pains 2, 24)."""
    if facts.platform != "darwin":
        return
    if facts.translated:
        yield Finding(
            code="intel-python",
            severity=WARNING,
            machine=facts.name,
            what="this Python is an Intel one, translated by Rosetta",
            how="sysctl.proc_translated is 1",
            breaks="no MPS, and everything is several times slower",
            fix="install an arm64 Python (https://www.python.org), and potluck into it",
            pains=(2,),
        )
        return
    if facts.architecture != "arm64" or facts.torch.version is None:
        return
    if facts.torch.mps_built is False:
        what, fix = "this torch is built without MPS", "pip install --force-reinstall torch"
    elif facts.torch.mps_available is False:
        what, fix = "torch has MPS, but this macOS does not offer it", "update macOS; a virtual machine has no MPS"
    else:
        if facts.torch.mps_available:
            yield Fine(
                machine=facts.name,
                what="GPU: MPS is available",
                details="tensors are sent through host memory, so gloo's refusal of MPS does "
                "not matter; a guest's gradients are compared with the host's on one batch before they count",
            )
        return
    yield Finding(
        code="mps-not-usable",
        severity=WARNING,
        machine=facts.name,
        what=what,
        how="torch.backends.mps.is_built() and is_available()",
        breaks="training runs on the CPU",
        fix=fix,
        pains=(2,),
    )


def mps_settings(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Variables that replace MPS's limits with worse problems (pain 24)."""
    if facts.platform != "darwin":
        return
    if facts.environment.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO") in ("0", "0.0"):
        yield Finding(
            code="mps-without-limit",
            severity=WARNING,
            machine=facts.name,
            what="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lets MPS take all memory",
            how="the variable is set here",
            breaks="instead of `MPS backend out of memory` the whole Mac can stop",
            fix="unset PYTORCH_MPS_HIGH_WATERMARK_RATIO   and, if memory is short: potluck join --micro-batch 1 "
            "TOKEN",
            pains=(24,),
        )
    if facts.environment.get("PYTORCH_ENABLE_MPS_FALLBACK", "0") not in ("", "0"):
        yield Finding(
            code="mps-fallback",
            severity=NOTE,
            machine=facts.name,
            what="PYTORCH_ENABLE_MPS_FALLBACK is set: operations that MPS lacks are silently computed on the CPU",
            how="the variable is set here",
            breaks="some models are much slower, without a message that says why",
            fix="unset PYTORCH_ENABLE_MPS_FALLBACK",
            pains=(24,),
        )


def windows(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Windows, and Linux inside it (pain 23)."""
    if facts.platform == "win32":
        yield Finding(
            code="windows",
            severity=NOTE,
            machine=facts.name,
            what="Potluck has never trained on real Windows hardware",
            how="sys.platform is win32; see docs/unverified.md",
            breaks="torchrun: some of torch's Windows builds have no libuv (`use_libuv was requested but "
            "PyTorch was build without libuv support`)",
            fix="in doubt use WSL2: wsl --install; for torchrun: set USE_LIBUV=0",
            pains=(23,),
        )
    if facts.wsl and facts.default_address and _behind_nat(facts.default_address):
        yield Finding(
            code="wsl-behind-nat",
            severity=WARNING,
            machine=facts.name,
            what=f"this is WSL2, whose address {facts.default_address} exists inside this computer only",
            how="the kernel's name holds 'microsoft', and the address is in 172.16.0.0/12",
            breaks="nobody can join a host here; as a guest it is fine",
            fix="run the guest here: potluck join TOKEN; or put networkingMode=mirrored under [wsl2] into "
            ".wslconfig",
            pains=(23,),
        )


def _behind_nat(address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network("172.16.0.0/12")
    except ValueError:
        return False
