"""Leaves of a model's output: what of it is compared, under which names, and what is named as left out."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from hashbench.core.run.leaves import LeftOut, NotComparableError, flatten
from hashbench.core.run.leaves import leaves as all_leaves
from hashbench.core.run.outputs import compare


@dataclasses.dataclass
class Boxes:
    scores: torch.Tensor
    label: str
    seen: dataclasses.InitVar[int] = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    scores: torch.Tensor


class Colour(enum.Enum):
    RED = object()


class Cache:
    """As those of transformers: layers of keys and values in a list, and much that is no content."""

    def __init__(self) -> None:
        self._layers = [types.SimpleNamespace(keys=torch.ones(1), kind=Cache)]
        self.update = lambda: None
        self.owner = self

    @property
    def length(self) -> int:
        raise AssertionError("a property was called")


class Registered:
    """A node whose content no attribute shows."""

    __slots__ = ("__weakref__",)


class Tagged(dict[str, Any]):
    """A mapping with an attribute of its own."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.tag, self.nothing = torch.ones(1), None


class Module(torch.nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2, affine=False)
        self.seen = torch.zeros(1)


pytree.register_pytree_node(Registered, lambda _: ([torch.ones(1), 2], {"form": "both"}), lambda *_: Registered())
Point = collections.namedtuple("Point", "x y")


def leaves(value) -> dict[str, object]:
    return dict(flatten(value, "output"))


ONE = torch.ones(1)
STRUCTURES = {
    "a tensor": (ONE, ["output"]),
    "nothing": (None, ["output"]),
    "a plain value": (3, ["output"]),
    "a list": ([ONE, 1], ["output.0", "output.1"]),
    "nested tuples": (((ONE,), [ONE]), ["output.0.0", "output.1.0"]),
    "a named tuple": (Point(ONE, 2), ["output.0", "output.1"]),
    "a mapping": ({"loss": ONE, 7: ONE}, ["output.loss", "output.7"]),
    "an ordered mapping": (collections.OrderedDict(a=ONE), ["output.a"]),
    "a set of names": ({"b", "a"}, ["output"]),
    "a dataclass, without its pseudo-fields": (Boxes(ONE, "cat"), ["output.scores", "output.label"]),
    "an empty list": ({"boxes": []}, ["output.boxes"]),
    "a NumPy array": (np.zeros(2), ["output"]),
    "a dataclass with slots": (Slotted(ONE), ["output.scores"]),
    "a namespace": (types.SimpleNamespace(a=ONE, b=Colour.RED), ["output.a", "output.b"]),
    "a distribution": (
        torch.distributions.Normal(ONE, ONE),
        ["output.loc", "output.scale", "output._batch_shape", "output._event_shape"],
    ),
    "a registered node": (Registered(), ["output.0", "output.1", "output.context.form"]),
    "a mapping with an attribute": (Tagged(a=ONE), ["output.a", "output.tag"]),
    "a mapping with keys that have no text": (
        {Colour.RED: 1, ONE: 2},
        ["output.Colour.RED", "output.Tensor#1.key", "output.Tensor#1"],
    ),
    "a queue": (collections.deque([ONE]), ["output.0"]),
    "values of a dict": ({"a": ONE}.values(), ["output.0"]),
    "a set of tensors": ({torch.ones(1), torch.zeros(1)}, ["output.0", "output.1"]),
    "a module": (
        Module(),
        [*(f"output.buffer.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))]
        + [f"output.{name}" for name in ("num_features", "eps", "momentum", "affine", "track_running_stats", "seen")],
    ),
    "a masked array": (np.ma.array([1, 2], mask=[0, 1]), ["output.mask", "output.data"]),
    "an array of objects": (np.array([1, ONE], dtype=object), ["output.shape.0", "output.0", "output.1"]),
    "an array of records": (np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), ["output.a", "output.b"]),
    "a tuple of torch's own": (torch.max(torch.ones(2, 2), dim=0), ["output.0", "output.1"]),
}


@pytest.mark.parametrize(("value", "names"), STRUCTURES.values(), ids=STRUCTURES)
def test_leaves_of(value, names: list[str]) -> None:
    assert list(leaves(value)) == names


LEFT_OUT = {
    "an object without attributes": (object(), "type builtins.object has no comparable content"),
    "a generator": ((_ for _ in range(3)), "type builtins.generator has no comparable content"),
    "an iterator": (iter([1]), "type builtins.list_iterator has no comparable content"),
    "a function": (len, "type builtins.builtin_function_or_method has no comparable content"),
    "what a function is bound to": (functools.partial(len), "type functools.partial has no comparable content"),
    "an object of Python's library": (Exception("x"), "type builtins.Exception has no comparable content"),
    "a tensor on no device": (torch.ones(1, 2, device="meta"), "a tensor without data, float32[1,2]"),
    "a sparse tensor on no device": (
        torch.empty(2, 3, layout=torch.sparse_coo, device="meta"),
        "a tensor without data, float32[2,3] torch.sparse_coo",
    ),
    "a fake tensor": (FakeTensorMode().from_tensor(torch.ones(3)), "a tensor without data, float32[3]"),
    "a parameter without a shape": (torch.nn.LazyLinear(1).weight, "a tensor without data"),
}


@pytest.mark.parametrize(("value", "why"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_left_out_by_name_beside_what_is_compared(value, why: str) -> None:
    found = dict(all_leaves({"logits": ONE, "aux": [value]}, "output"))
    assert found == {"output.logits": ONE, "output.aux.0": LeftOut("output.aux.0", why)}
    with pytest.raises(NotComparableError, match=re.escape(f"output.aux.0: {why}")):
        leaves({"aux": [value]})


def test_iterator_is_not_consumed() -> None:
    items = iter([1, 2])
    assert list(all_leaves({"items": items}, "output"))
    assert list(items) == [1, 2]


def test_cache_properties_are_not_called() -> None:
    found = dict(all_leaves(Cache(), "output.past_key_values"))
    assert {name.removeprefix("output.past_key_values."): str(leaf) for name, leaf in found.items()} == {
        "_layers.0.keys": "tensor([1.])",
        "_layers.0.kind": f"class {__name__}.Cache",
        "update": "output.past_key_values.update: type builtins.function has no comparable content",
        "owner": "the same object as output.past_key_values",
    }


def test_depth_and_number_of_objects_are_bounded() -> None:
    deep: Any = ONE
    for _ in range(5000):
        deep = types.SimpleNamespace(inner=deep)
    (found,) = dict(all_leaves(deep, "output")).values()
    assert "beyond 100 levels" in str(found)
    many = [types.SimpleNamespace(number=number) for number in range(10_050)]
    assert sum(isinstance(leaf, LeftOut) for _, leaf in all_leaves(many, "output")) == 50


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (types.SimpleNamespace(_x=torch.ones(1)), types.SimpleNamespace(_x=torch.zeros(1))),
        ({torch.ones(1), torch.zeros(1)}, {torch.ones(1), torch.full((1,), 2.0)}),
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
        (np.array(["a"]), np.array(["b"])),
        (np.array(["2020-01-01"], dtype="M8[D]"), np.array(["2020-01-02"], dtype="M8[D]")),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.ones(1).untyped_storage(), torch.zeros(1).untyped_storage()),
        (type("Text", (str,), {"__repr__": lambda _: "text"})("a"), type("Text", (str,), {})("b")),
        (np.longdouble(1), np.longdouble(1) + np.finfo(np.longdouble).eps),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_inside_is_seen(first, second) -> None:
    assert compare(leaves(first), leaves(first)) is None
    assert compare(leaves(first), leaves(second)) is not None


def test_order_without_meaning_is_none() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert compare(leaves({one, two}), leaves({two, one})) is None
    assert compare(leaves({"a": one, "b": two}), leaves({"b": two, "a": one})) is None


def test_set_is_compared_by_content_not_by_order() -> None:
    assert leaves({8, 0}) == leaves({0, 8})  # small integers that collide come in the order of insertion
    assert leaves({"a"}) != leaves({"b"})


def test_numpy_array_is_taken_as_it_is_now() -> None:
    array = np.arange(3.0)
    (found,) = leaves(array).values()
    array[:] = 0
    assert found.tolist() == [0.0, 1.0, 2.0]


def test_numpy_array_of_any_byte_order_and_stride() -> None:
    (found,) = leaves(np.arange(6.0, dtype=">f8").reshape(2, 3)[:, ::-1]).values()
    assert torch.equal(found, torch.tensor([[2.0, 1.0, 0.0], [5.0, 4.0, 3.0]], dtype=torch.float64))


def test_zero_dimensional_numpy_value_keeps_its_shape() -> None:
    (found,) = leaves(np.array(1.5, dtype=np.float32)).values()
    assert found.shape == ()
