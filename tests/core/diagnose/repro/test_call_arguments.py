"""Arguments of a call as JSON, checked against the op's schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.call import GeneratorSlot, Slot
from hashbench.core.diagnose.repro.call_arguments import (
    Arguments,
    BadCallError,
    check_arguments,
    encoded,
    find_op,
    fits,
)
from hashbench.core.errors import HashbenchError


def test_argument_of_a_strange_type_cannot_be_written() -> None:
    with pytest.raises(BadCallError, match="an argument is a object"):
        encoded(object())


FITS = {
    "a tensor": (Slot(0), "Tensor", True),
    "a number where a mode sees one for a tensor": (2.5, "Tensor", True),
    "a text for a tensor": ("x", "Tensor", False),
    "nothing for an optional tensor": (None, "Optional[Tensor]", True),
    "nothing for a tensor": (None, "Tensor", False),
    "a list with nothing in it": ([Slot(0), None], "List[Optional[Tensor]]", True),
    "a list of lists": ([[1]], "List[int]", False),
    "a dtype, which a schema calls int": (torch.float32, "Optional[int]", True),
    "a whole number for a float": (1, "float", True),
    "a float for a whole number": (1.5, "int", False),
    "a complex number": (1j, "number", True),
    "a generator": (GeneratorSlot(0), "Optional[Generator]", True),
    "a type that files cannot hold": (1, "__torch__.torch.classes.quantized.LinearPackedParamsBase", False),
}


@pytest.mark.parametrize(("value", "kind", "expected"), FITS.values(), ids=FITS)
def test_what_an_argument_takes(value: Any, kind: str, expected: bool) -> None:
    assert fits(value, kind) is expected


VALUES = {
    "nothing": None,
    "a number without end": float("-inf"),
    "not a number": float("nan"),
    "a complex number": complex(1.5, float("inf")),
    "a device": torch.device("cpu"),
    "a dtype": torch.bfloat16,
    "a memory format": torch.channels_last,
    "a tensor": Slot(1),
    "a generator": GeneratorSlot(0, "cpu"),
    "containers": [1, (2.5, "a"), {"b": [True, None]}],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_an_argument_is_read_back_as_it_was(value: Any) -> None:
    text = json.dumps(encoded(value), allow_nan=False)
    assert repr(Arguments(tensors=2, generators=1, moved={}).decoded(json.loads(text))) == repr(value)


def test_a_device_that_is_not_here_is_replaced() -> None:
    arguments = Arguments(tensors=0, generators=1, moved={"cuda:3": "cuda:0"})
    assert arguments.decoded({"device": "cuda:3"}) == torch.device("cuda:0")
    assert arguments.decoded({"generator": 0, "device": "cuda:3"}) == GeneratorSlot(0, "cuda:0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param({"tensor": 2}, "tensor is 2, which is not a whole number from 0 to 1", id="no such tensor"),
        pytest.param({"tensor": True}, "tensor is True", id="a bool is no index"),
        pytest.param({"float": "many"}, "'many' is not a number", id="no number"),
        pytest.param({"device": "nowhere"}, "'nowhere' is not a device", id="no device"),
        pytest.param({"torch": "torch.load"}, "'torch.load' is not an argument", id="a function"),
        pytest.param({"pickle": "x"}, "an argument is of the unknown kind 'pickle'", id="an unknown kind"),
        pytest.param({}, "neither a value nor a reference", id="an empty mapping"),
    ],
)
def test_other_content_is_refused(content: Any, words: str) -> None:
    with pytest.raises(BadCallError, match=re.escape(words)):
        Arguments(tensors=2, generators=1, moved={}).decoded(content)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        pytest.param((Slot(0), Slot(1), 1, 2), {}, "takes at most 2 arguments by position", id="too many"),
        pytest.param((Slot(0),), {}, "needs the argument other", id="too few"),
        pytest.param((Slot(0), Slot(1)), {"beta": 1}, "has no such arguments", id="another name"),
        pytest.param((Slot(0), Slot(1)), {"self": Slot(1)}, "has no such arguments", id="given twice"),
        pytest.param((Slot(0), Slot(1)), {"alpha": "1"}, "alpha of aten.add.Tensor is not a number", id="a wrong type"),
    ],
)
def test_arguments_that_the_schema_does_not_take_are_refused(args: Any, kwargs: Any, words: str) -> None:
    check_arguments(torch.ops.aten.add.Tensor, (Slot(0), Slot(1)), {"alpha": 2})
    with pytest.raises(BadCallError, match=re.escape(words)):
        check_arguments(torch.ops.aten.add.Tensor, args, kwargs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("aten.add", "is not the name of an op", id="no overload"),
        pytest.param("aten.add.Tensor()", "is not the name of an op", id="code"),
        pytest.param("aten.add.Nothing", "is not an overload of an op", id="an unknown overload"),
        pytest.param("aten.__class__.mro", "the op aten.__class__.mro does not exist", id="an attribute"),
    ],
)
def test_a_name_that_is_no_op_is_refused(name: str, words: str) -> None:
    assert find_op("aten.add.Tensor") is torch.ops.aten.add.Tensor
    with pytest.raises((BadCallError, HashbenchError), match=re.escape(words)):
        find_op(name)
