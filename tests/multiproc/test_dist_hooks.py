"""Compressed DDP on stock gloo, in real processes: it learns as without, for fewer bytes, and feedback matters."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Ranks

WORLD = 2
DEADLINE_S = 110.0
CASES = ("exact", "bf16", "int8", "int4", "topk:0.03", "int4 bfloat16", "powersgd:2", "topk:0.03 without")


pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    with Ranks(WORLD) as ranks:
        return ranks.call("support.dist_training:hooked", WORLD, CASES, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_weights(results: list[dict[str, dict[str, Any]]], case: str) -> None:
    assert results[0][case]["weights"] == results[1][case]["weights"]


@pytest.mark.parametrize(
    ("case", "within"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.05), ("int4 bfloat16", 0.1)]
)
def test_the_loss_is_close_to_the_exact_one(
    results: list[dict[str, dict[str, Any]]], case: str, within: float
) -> None:
    exact = results[0]["exact"]["loss"]
    assert results[0][case]["loss"] == pytest.approx(exact, rel=within)


def test_the_residual_matters(results: list[dict[str, dict[str, Any]]]) -> None:
    """Three values in a hundred: with feedback it learns most of what is to be learned, without it falls behind."""
    exact, with_, without = (results[0][case]["loss"] for case in ("exact", "topk:0.03", "topk:0.03 without"))
    assert with_ - exact < 0.7 * (without - exact)


def test_powersgd_learns_too(results: list[dict[str, dict[str, Any]]]) -> None:
    assert results[0]["powersgd:2"]["loss"] < 0.6  # 1.0 at the start


@pytest.mark.parametrize(
    ("case", "factor"), [("bf16", 1.9), ("int8", 3.5), ("int4", 6.5), ("topk:0.03", 12.0), ("int4 bfloat16", 3.2)]
)
def test_fewer_bytes_are_sent(results: list[dict[str, dict[str, Any]]], case: str, factor: float) -> None:
    assert results[0][case]["exact"] > factor * results[0][case]["sent"]
