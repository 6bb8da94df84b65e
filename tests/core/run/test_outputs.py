"""Walking nested values: what is a container, how its parts are called, and what a copy of it is."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from hashbench.core.trace.arguments import fields_of, items_of, leaves, mapped, named_tensors


class Pair(NamedTuple):
    first: Any
    second: Any


class Named(collections.UserDict[str, Any]):
    """A mapping that no pytree knows, with a constructor of its own."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title


@dataclass
class Boxes:
    boxes: Any


def named(**items: Any) -> Named:
    made = Named("title")
    made.update(items)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, (2, 3)], [1, 2, 3]),
        ({"a": 1, "b": [2, None]}, [1, 2, None]),
        (named(a=[1]), [1]),
        (MappingProxyType({"a": 1}), [1]),
        (torch.Size([4, 5]), [4, 5]),
        ("text", ["text"]),
        ([], []),
    ],
)
def test_leaves_are_what_is_no_list_tuple_or_mapping(value: Any, expected: list[Any]) -> None:
    assert list(leaves(value)) == expected


def test_a_dataclass_is_a_leaf_but_has_fields() -> None:
    value = Boxes(torch.ones(1))
    assert list(leaves([value])) == [value]
    assert items_of(value) is None
    assert [name for name, _ in fields_of(value) or ()] == ["boxes"]
    assert fields_of(Boxes) is None


def test_tensors_are_called_by_their_place() -> None:
    one = torch.ones(1)
    value = [named(x=one), Pair(one, 2), {"deep": [Boxes(one)]}, 3]
    assert [name for name, _ in named_tensors(value)] == ["0.x", "1.0", "2.deep.0.boxes"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, (2, [3])], [10, (20, [30])]),
        ({"a": 1}, {"a": 10}),
        (collections.OrderedDict(a=1), collections.OrderedDict(a=10)),
        (Pair(1, [2]), Pair(10, [20])),
        (torch.Size([4]), torch.Size([40])),
        (7, 70),
    ],
)
def test_a_copy_has_the_same_types_and_other_leaves(value: Any, expected: Any) -> None:
    copied = mapped(value, lambda leaf: leaf * 10)
    assert (type(copied), copied) == (type(expected), expected)


def test_clone_inputs_rebuilds_containers() -> None:
    value = named(x=[1])
    copied = mapped(value, lambda leaf: leaf + 1)
    assert (copied["x"], value["x"], copied.title) == ([2], [1], "title")
