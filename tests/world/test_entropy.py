"""Unseeded randomness made constant: the same stream at every entry, not the same value; random again afterwards."""

from __future__ import annotations

import _random
import os
import random
import secrets
import ssl
import sys
import tempfile
import types
import uuid
from collections.abc import Callable
from contextlib import suppress
from os import urandom
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hashbench.replay.controls.system import constant_entropy

Draw = Callable[[], Any]


def draws(draw: Draw) -> list[Any]:
    """Four values. The global generators start from a seed, as they do in every run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with constant_entropy():
        return [draw() for _ in range(4)]


def in_default(draw: Draw) -> Draw:
    def ask(draw: Draw = draw) -> Any:
        return draw(8)

    return ask


def in_closure(draw: Draw) -> Draw:
    return lambda: draw(8)


def in_module() -> Draw:
    module = types.ModuleType("somebodys")
    exec("from os import urandom\nfrom random import Random", vars(module))
    return lambda: (module.urandom(8), module.Random().random())


def on_model() -> Draw:
    model = torch.nn.Module()
    model.entropy = os.urandom
    return lambda: model.entropy(8)


def from_seeded_globally(seed: Draw, draw: Draw) -> Draw:
    return lambda: (seed(), draw())[1]


def sources() -> dict[str, Draw]:
    """Made in a test, as a model is made in a worker: references are not looked for in what was there before."""
    return {
        "os.urandom": lambda: os.urandom(8),
        "os.urandom by from-import": lambda: urandom(8),
        "os.urandom in a default argument": in_default(os.urandom),
        "os.urandom in a closure": in_closure(os.urandom),
        "os.urandom in a list": lambda held=[os.urandom]: held[0](8),
        "os.urandom on a model": on_model(),
        "os.urandom in another module": in_module(),
        "os.getrandom": lambda: os.getrandom(8),
        "ssl.RAND_bytes": lambda: ssl.RAND_bytes(8),
        "secrets.token_bytes": lambda: secrets.token_bytes(8),
        "secrets.token_hex": lambda: secrets.token_hex(8),
        "secrets.randbelow": lambda: secrets.randbelow(2**64),
        "secrets.choice": lambda: secrets.choice(range(2**60)),
        "uuid1": lambda: uuid.uuid1(),
        "uuid4": lambda: uuid.uuid4(),
        "SystemRandom": lambda: random.SystemRandom().random(),
        "random.Random()": lambda: random.Random().random(),
        "random.seed()": from_seeded_globally(random.seed, random.random),
        "random.seed(None)": lambda: (random.seed(None), random.gauss(0, 1))[1],
        "numpy default_rng()": lambda: np.random.default_rng().random(),
        "numpy SeedSequence()": lambda: np.random.SeedSequence().entropy,
        "numpy PCG64()": lambda: np.random.PCG64().random_raw(),
        "numpy MT19937()": lambda: np.random.MT19937().random_raw(),
        "numpy Philox()": lambda: np.random.Philox().random_raw(),
        "numpy RandomState()": lambda: np.random.RandomState().rand(),
        "numpy.random.seed()": from_seeded_globally(np.random.seed, np.random.rand),
        "torch.seed()": lambda: (torch.seed(), torch.rand(1).item()),
        "torch.Generator.seed()": lambda: torch.Generator().seed(),
    }


@pytest.mark.parametrize("name", sources())
def test_a_source_gives_the_same_stream_at_every_entry(name: str) -> None:
    source = sources()[name]
    first = draws(source)
    assert len(set(first)) == 4, "within a run no two values are the same"
    assert draws(source) == first
    assert len({*first, *(source() for _ in range(4))}) == 8, "afterwards it is random again"


def test_what_was_drawn_before_changes_nothing() -> None:
    first = draws(uuid.uuid4)
    for source in sources().values():
        source()
    assert draws(uuid.uuid4) == first


def test_seeds_that_are_given_count() -> None:
    expected = random.Random(5).random(), np.random.default_rng(5).random(), random.Random("text").random()
    with constant_entropy():
        assert (
            random.Random(5).random(),
            np.random.default_rng(5).random(),
            random.Random("text").random(),
        ) == expected
        generator = torch.Generator()
        seed = generator.seed()
        assert generator.initial_seed() == seed
        first = torch.rand(3, generator=generator)
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(seed)), first)


def test_a_source_that_fails_still_fails() -> None:
    with constant_entropy(), pytest.raises(TypeError):
        random.Random([])


@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
def test_everything_is_put_back(error: bool) -> None:
    attributes = ((_random.Random, "seed"), (torch.Generator, "seed"))
    before = [id(vars(owner)[name]) for owner, name in attributes]
    with suppress(ZeroDivisionError), constant_entropy():
        assert all(id(vars(owner)[name]) != old for (owner, name), old in zip(attributes, before, strict=True))
        assert os.urandom.__self__ is not sys.modules["posix"]
        if error:
            raise ZeroDivisionError
    assert [id(vars(owner)[name]) for owner, name in attributes] == before
    assert os.urandom.__self__ is sys.modules["posix"]


def test_temporary_files_do_not_collide() -> None:
    made = []
    for _ in range(2):
        with constant_entropy():
            made.append(Path(tempfile.mkdtemp()))
    for folder in made:
        folder.rmdir()
    assert made[0] != made[1]


def test_entropy_can_be_begun_anew_without_another_entry() -> None:
    with constant_entropy() as restart:
        first = [os.urandom(8), np.random.default_rng().random()]
        assert os.urandom(8) != first[0]
        restart()
        assert [os.urandom(8), np.random.default_rng().random()] == first
