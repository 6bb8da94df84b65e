"""Every generator that is alive: found however it is held, named by that, watched, and put back."""

from __future__ import annotations

import functools
import gc
import importlib.util
import random
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hashbench.core.diagnose.replay.controls.generators import Generators
from hashbench.core.trace.api import HashDebugTrace


class Holder:
    on_class: Any = None

    def __init__(self, generator: Any) -> None:
        self.noise = generator


class Slotted:
    __slots__ = ("noise",)

    def __init__(self, generator: Any) -> None:
        self.noise = generator


class Model(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.noise = generator


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.Generator": (torch.Generator, lambda one: torch.rand(4, generator=one)),
    "numpy Generator": (lambda: np.random.default_rng(1), lambda one: one.random()),
    "numpy Generator of MT19937": (lambda: np.random.Generator(np.random.MT19937(1)), lambda one: one.random()),
    "numpy BitGenerator": (lambda: np.random.Philox(1), lambda one: one.random_raw()),
    "numpy RandomState": (lambda: np.random.RandomState(1), lambda one: one.randn()),
    "random.Random": (lambda: random.Random(1), lambda one: one.gauss(0, 1)),
    "subclass of random.Random": (lambda: type("Mine", (random.Random,), {})(1), lambda one: one.random()),
}


def in_closure(generator: Any) -> Callable[[], Any]:
    def draw() -> Any:
        return generator

    return draw


def in_default(generator: Any) -> Callable[[], Any]:
    def draw(source: Any = generator) -> Any:
        return source

    return draw


def in_keyword_default(generator: Any) -> Callable[[], Any]:
    def draw(*, source: Any = generator) -> Any:
        return source

    return draw


def with_dict(holder: Any) -> Any:
    assert holder.__dict__
    return holder


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "instance": (Holder, "Holder.noise"),
    "instance with a dict": (lambda one: with_dict(Holder(one)), "Holder.noise"),
    "slot": (Slotted, "Slotted.noise"),
    "model": (Model, "Model.noise"),
    "class": (lambda one: type("Made", (), {"noise": one}), "Made.noise"),
    "closure": (in_closure, "closure of in_closure.<locals>.draw"),
    "default": (in_default, "default of in_default.<locals>.draw"),
    "keyword default": (in_keyword_default, "default of in_keyword_default.<locals>.draw['source']"),
    "list of a model": (lambda one: Model([one]), "Model.noise[0]"),
    "dict of an instance": (lambda one: Holder({"a": one}), "Holder.noise['a']"),
    "list in a dict": (lambda one: Holder({"a": [0, one]}), "Holder.noise['a'][1]"),
    "partial": (lambda one: Holder(functools.partial(print, one)), "Holder.noise[0]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_watched_and_put_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draw = KINDS[kind]
    monkeypatch.setattr(sys.modules[__name__], "NOISE", make(), raising=False)
    generator = globals()["NOISE"]
    draw(generator)
    found = Generators.alive()
    name = f"{__name__}.NOISE"
    assert name in found.names
    assert found.changed() == ()
    first = str(draw(generator))
    assert found.changed() == (name,)
    found.restored()
    assert found.changed() == ()
    assert str(draw(generator)) == first


@pytest.mark.parametrize("how", HOLDERS)
def test_generator_is_named_by_its_holder(how: str) -> None:
    """One of each kind, which one search finds."""
    hold, name = HOLDERS[how]
    holders = [hold(KINDS[kind][0]()) for kind in ("torch.Generator", "numpy Generator", "random.Random")]
    gc.collect()  # which makes the collector forget dicts and tuples of nothing but a torch.Generator
    names = [found for found in Generators.alive().names if found.partition(" (")[0] == name]
    assert names == [name, f"{name} (2)", f"{name} (3)"]
    del holders


@pytest.mark.parametrize("kind", ["torch.Generator", "numpy Generator", "random.Random"])
def test_global_of_unlisted_module_is_named_by_file(kind: str, tmp_path: Path) -> None:
    """As the harness of benchmarks/dynamo executes the file of a model; of a dict that merely looks like one, no name
    is made."""
    (tmp_path / "nets.py").write_text("NOISE = None\n\nclass Net:\n    def forward(self):\n        return NOISE\n")
    spec = importlib.util.spec_from_file_location("module_name", tmp_path / "nets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net, module.NOISE = module.Net(), KINDS[kind][0]()
    alike = {"__spec__": "nets", "OTHER": KINDS[kind][0]()}
    del module
    assert "module_name" not in sys.modules
    names = Generators.alive().names
    assert "nets.NOISE" in names
    assert "nets.OTHER" not in names
    assert net.forward() is not None
    del alike


@pytest.mark.parametrize("kind", ["numpy Generator", "numpy RandomState", "random.Random"])
def test_a_stored_method_leads_to_its_generator(kind: str) -> None:
    holder = Holder(KINDS[kind][0]().random)
    found = Generators.alive()
    assert "Holder.noise" in found.names
    holder.noise()
    assert found.changed() == ("Holder.noise",)


def test_one_of_several_is_put_back() -> None:
    holders = [Holder(torch.Generator()), Model(torch.Generator())]
    found = Generators.alive()
    for holder in holders:
        torch.rand(2, generator=holder.noise)
    assert found.changed() == ("Holder.noise", "Model.noise")
    found.restored(only="Model.noise")
    assert found.changed() == ("Holder.noise",)


def test_two_of_one_name_are_told_apart() -> None:
    holders = [Holder(torch.Generator()) for _ in range(2)]
    found = Generators.alive()
    for holder in holders:
        torch.rand(2, generator=holder.noise)
    assert found.changed() == ("Holder.noise", "Holder.noise (2)")


def test_the_global_generators_are_among_them() -> None:
    found = Generators.alive()
    assert {"numpy.random", "random", "torch.default_generator"} <= {*found.names}
    before = random.random(), np.random.rand(), torch.rand(1).item()
    assert found.changed() == ("numpy.random", "random", "torch.default_generator")
    found.restored()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before


def test_what_has_no_state_or_is_not_the_users_is_left_out() -> None:
    mine = Holder(random.SystemRandom())
    theirs = tempfile._RandomNameSequence()
    next(theirs)
    names = Generators.alive().names
    assert "Holder.noise" not in names
    assert not [name for name in names if name.startswith(("tempfile", "_RandomNameSequence"))]
    del mine, theirs


def test_a_module_of_a_zoo_is_named_as_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hashbench_zoo_outside")
    module._NOISE = torch.Generator()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "outside._NOISE" in Generators.alive().names


def test_a_search_leaves_no_trace() -> None:
    holder = Holder(torch.Generator())
    with HashDebugTrace() as trace:
        found = Generators.alive()
        found.changed()
        found.restored()
    assert not trace.finish().records
    assert gc.isenabled()
    del holder


def test_a_bit_generator_is_not_told_beside_its_generator() -> None:
    source = np.random.PCG64(1)
    holders = [Holder(np.random.Generator(source)), Model(source)]
    names = Generators.alive().names
    assert "Holder.noise" in names
    assert "Model.noise" not in names
    del holders


def test_search_keeps_only_generators_alive() -> None:
    holder = Holder(np.random.default_rng(1).random)
    alive = weakref.ref(holder)
    gc.disable()
    try:
        found = Generators.alive()
        del holder
        assert alive() is None
        assert "Holder.noise" in found.names
    finally:
        gc.enable()
