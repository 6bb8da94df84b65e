"""The corpus ``models/pairs``: in float64 clean twins agree, and each planted mistake reaches a result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from benchmarks.pairs import FOLDER, Row, corpus, loaded, part

pytest.importorskip("transformers")
pytest.importorskip("timm")

ROWS = corpus()
PAIRS = sorted({row.pair for row in ROWS})
SAMPLE = ["gpt2_nano", "lora_dropout", "norm_backward"]
LOW = {torch.float32, torch.bfloat16}
EQUAL, REACHES = 1e-9, 1e-7


class Wide(TorchDispatchMode):
    """Turn each low dtype that an op is asked for into float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(torch.dtype, wide, args), **tree_map_only(torch.dtype, wide, kwargs or {}))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in LOW else dtype


@pytest.fixture
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def results(pair: str, side: str, fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Run one side in float64; its outputs, and its sorted gradients."""
    module = loaded(pair)
    model = (module.make_a() if side == "a" else module.make_b(fault)).double()
    given = tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, part(module, "inputs", side)()
    )
    outputs, loss = part(module, "outputs", side), part(module, "loss", side)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with Wide(), torch.set_grad_enabled(loss is not None):
        result = model(**given) if isinstance(given, dict) else model(*given)
        if loss is not None:
            loss(result).backward()
    torch.set_default_dtype(torch.float32)
    found = tree_leaves(outputs(result) if outputs else result)
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None and loss is not None]
    return torch.cat([t.detach().flatten() for t in found]), torch.cat([*gradients, torch.zeros(1)]).sort()[0]


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape:
        return float("inf")
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))


def wrong_rows(pair: str) -> list[str]:
    """Return the rows whose results are not as their outcome says, with how far both sides are apart."""
    right = results(pair, "a")
    wrong = []
    for row in ROWS:
        if row.pair != pair or row.dtype:
            continue
        distance = max(map(apart, right, results(pair, "b", row.fault)))
        clean = "rounding" in row.outcome
        if not (distance <= EQUAL if clean else distance > REACHES):
            wrong.append(f"{row}: {distance:.1e}")
    return wrong


@pytest.mark.parametrize("pair", SAMPLE)
@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_mistakes_of_a_sample_reach_a_result_and_clean_twins_agree(pair: str) -> None:
    assert wrong_rows(pair) == []


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in SAMPLE])
@pytest.mark.exhaustive
@pytest.mark.usefixtures("double")
def test_mistakes_reach_a_result_and_clean_twins_agree(pair: str) -> None:
    assert wrong_rows(pair) == []


def test_the_table_lists_each_file_with_a_clean_twin() -> None:
    assert {path.stem for path in FOLDER.glob("[!_]*.py")} == set(PAIRS)
    assert {row.pair for row in ROWS if not row.fault and not row.dtype} == set(PAIRS)
    assert len({(row.pair, row.dtype, row.fault) for row in ROWS}) == len(ROWS)


def test_a_third_has_other_peoples_code_on_one_side() -> None:
    texts = [(FOLDER / f"{pair}.py").read_text(encoding="utf-8") for pair in PAIRS]
    others = [text for text in texts if any(f"from {name}" in text for name in ("transformers", "timm", "torchvision"))]
    assert 3 * len(others) >= len(texts)
    assert not any("hashbench" in text for text in texts)


@pytest.mark.parametrize("row", [row for row in ROWS if row.line_fault], ids=str)
def test_a_marked_line_is_there(row: Row) -> None:
    assert row.lines()
