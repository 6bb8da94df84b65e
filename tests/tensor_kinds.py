"""Tensors that are not plain dense memory: for each kind what makes one, and two values that give other content."""

from __future__ import annotations

import pytest
import torch


def _jagged(content: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(content[:1]), torch.tensor(content[1:])], layout=torch.jagged)


def _channels(scale: float) -> torch.Tensor:
    return torch.quantize_per_channel(torch.zeros(2, 3), torch.tensor([1.0, scale]), torch.zeros(2), 0, torch.qint8)


KINDS = [
    pytest.param(lambda v: torch.tensor([[0, v], [0, 0]]).to_sparse(), 1.0, 2.0, id="sparse values"),
    pytest.param(lambda v: torch.eye(3).roll(v, 0).to_sparse(), 0, 1, id="sparse places"),
    pytest.param(lambda v: torch.eye(3).roll(v, 0).to_sparse_csr(), 0, 1, id="csr"),
    pytest.param(lambda v: torch.eye(3).roll(v, 0).to_sparse_csc(), 0, 1, id="csc"),
    pytest.param(lambda v: torch.eye(4).roll(v, 0).to_sparse_bsr((2, 2)), 0, 1, id="bsr"),
    pytest.param(lambda v: torch.eye(4).roll(v, 0).to_sparse_bsc((2, 2)), 0, 1, id="bsc"),
    pytest.param(lambda v: torch.nested.nested_tensor([torch.ones(v), torch.ones(3)]), 1, 2, id="nested"),
    pytest.param(_jagged, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], id="jagged"),
    pytest.param(
        lambda v: torch.quantize_per_tensor(torch.zeros(3), v, 0, torch.qint8), 0.1, 0.2, id="quantized scale"
    ),
    pytest.param(_channels, 1.0, 2.0, id="quantized scales by channel"),
    pytest.param(lambda v: torch.full((4, 4), v).to_mkldnn(), 1.0, 2.0, id="mkldnn"),
    pytest.param(
        lambda v: torch.ones(2, dtype=torch.cfloat).mul(1j).conj() if v else torch.ones(2).mul(1j),
        0,
        1,
        id="conjugate bit",
    ),
    pytest.param(
        lambda v: torch.ones(2).mul(1j).conj().imag if v else torch.ones(2).mul(1j).imag, 0, 1, id="negative bit"
    ),
    pytest.param(lambda v: torch._neg_view(torch.ones(2)) if v else torch.ones(2), 0, 1, id="dense negative bit"),
    pytest.param(lambda v: torch.tensor(v), 1.0, 2.0, id="no dimension"),
    pytest.param(lambda v: torch.nn.Parameter(torch.tensor([v])), 1.0, 2.0, id="parameter"),
    pytest.param(lambda v: torch.arange(v, v + 3).expand(4, 3), 0.0, 1.0, id="expanded"),
    pytest.param(lambda v: torch.arange(20.0)[v::3], 0, 1, id="strided"),
    pytest.param(lambda v: torch.ones(2, 2) if v else torch._efficientzerotensor((2, 2)), 0, 1, id="zero tensor"),
    pytest.param(lambda v: torch.arange(v, v + 5).to(torch.float8_e4m3fn), 0.0, 1.0, id="float8"),
    pytest.param(
        lambda v: torch.quantize_per_tensor(torch.arange(v, v + 4), 0.1, 0, torch.quint8), 0.0, 1.0, id="quantized"
    ),
]
"""``(make, first, second)``: ``make(first)`` and ``make(second)`` have other content."""
