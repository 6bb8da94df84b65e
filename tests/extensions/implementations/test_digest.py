"""Digests: additive over parts, blind to what they should be blind to, and rounding as torch rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hashbench.extensions.implementations import digest
from hashbench.extensions.implementations.dtypes import NARROWER, is_representable, rounded, value_text
from hashbench.extensions.implementations.lines import how_turned
from hashbench.extensions.implementations.state import state_of

ELEMENTS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]).flatmap(
    lambda kind: arrays.arrays(kind, st.integers(0, 50))
)


@given(ELEMENTS, st.data())
def test_the_additive_digest_is_the_sum_over_parts_in_any_order(elements: np.ndarray, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, elements.size))
    order = data.draw(st.permutations(range(elements.size)))
    whole = digest.additive(elements)
    assert whole == (digest.additive(elements[:at]) + digest.additive(elements[at:])) % 2**64
    assert whole == digest.additive(elements[order])


@given(ELEMENTS.filter(lambda each: each.size > 0), st.data())
def test_one_other_element_is_another_additive_digest(elements: np.ndarray, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, elements.size - 1))
    other = elements.copy()
    other[at] ^= elements.dtype.type(data.draw(st.integers(1, 2 ** (8 * elements.itemsize) - 1)))
    assert digest.additive(other) != digest.additive(elements)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
def test_digests_do_not_depend_on_how_much_is_read_at_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = state_of({"x": torch.randn(3, 9, 11)}, "a")
    whole, lines = digest.digest(tensors, "x", "float32"), digest.lines(tensors, "x", "float32")
    monkeypatch.setattr(digest, "CHUNK", chunk)
    assert digest.digest(tensors, "x", "float32") == whole
    again = digest.lines(tensors, "x", "float32")
    assert lines.shape == (3, 9, 11)
    assert (again.rows.tolist(), again.columns.tolist()) == (lines.rows.tolist(), lines.columns.tolist())
    assert len({*lines.rows.tolist(), *lines.columns.tolist()}) == 3 * 9 + 3 * 11


def test_a_line_has_the_same_digest_wherever_it_is() -> None:
    x = torch.randn(20, 30)
    tensors = state_of({"x": x, "t": x.t().contiguous(), "tail": x[5:].clone(), "zero": torch.zeros(9, 30)}, "a")
    lines = {name: digest.lines(tensors, name, "float32") for name in tensors.headers}
    assert lines["x"].rows.tolist() == lines["t"].columns.tolist()
    assert lines["x"].rows[5:].tolist() == lines["tail"].rows.tolist()
    assert {*lines["zero"].rows.tolist()} == {digest.line_of_zeros(30)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.t(), "transposed"),
        (lambda x: x.flip(0), "rows permuted"),
        (lambda x: x.flip(1), "columns permuted"),
        (lambda x: x.t().flip(1), "transposed, rows permuted"),
        (lambda x: x.flatten().flip(0).reshape(20, 30), "in another order"),
        (lambda x: x.reshape(30, 20), "in another order"),
    ],
)
def test_how_elements_moved_is_told(change: object, said: str) -> None:
    x = torch.randn(20, 30)
    tensors = state_of({"a": x, "b": change(x).contiguous()}, "a")  # type: ignore[operator]
    assert how_turned(*(digest.lines(tensors, name, "float32") for name in "ab")) == said


@pytest.mark.parametrize(("dtype", "to"), [(wide, to) for wide, narrow in NARROWER.items() for to in narrow])
def test_rounding_is_torchs(dtype: str, to: str) -> None:
    special = [0.0, -0.0, 1.0, float("inf"), -float("inf"), 65504.0, 65519.9, 65520.0, 1e-8, 1e-40, 3.4e38, 1e300]
    values = torch.cat([torch.tensor(special, dtype=torch.float64), torch.randn(5000, dtype=torch.float64) * 1e3])
    values = torch.cat([values, values / 1e9]).to(getattr(torch, dtype))
    tensors = state_of({"x": values, "y": values.to(getattr(torch, to))}, "a")
    found = rounded(tensors.read("x", 0, values.numel()), dtype, to)
    assert found.tolist() == tensors.read("y", 0, values.numel()).tolist()
    exact = bool((values.to(getattr(torch, to)).double() == values.double()).all())
    assert is_representable(tensors.read("x", 0, values.numel()), dtype, to) is exact


def test_every_nan_is_rounded_to_one() -> None:
    bits = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF], np.uint32)
    assert {*rounded(bits, "float32", "bfloat16").tolist()} == {0x7FC0}
    assert {*rounded(bits, "float32", "float16").tolist()} == {0x7E00}


@pytest.mark.parametrize(
    ("bits", "dtype", "text"),
    [(0x3F80, "bfloat16", "1"), (0xFFFFFFFF, "int32", "-1"), (255, "uint8", "255"), (0x38, "float8_e4m3fn", "0x38")],
)
def test_a_value_is_shown_as_its_dtype_has_it(bits: int, dtype: str, text: str) -> None:
    assert value_text(bits, dtype) == text
