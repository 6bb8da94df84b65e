"""Which tensors a step reads."""

from __future__ import annotations

import random

from hashbench.extensions.watch.rotation import Rotation

LARGE = [(f"layer.{number}.weight", 4 * (number + 1) * 10_000) for number in range(200)]


def test_a_rotation_reads_every_tensor_once_in_a_turn() -> None:
    rotation = Rotation.of(LARGE, every=16)
    seen = [index for step in range(5, 21) for index in rotation.read_at(step)]
    assert len(rotation.parts) == 16
    assert sorted(seen) == list(range(200))


def test_parts_are_of_about_equal_size() -> None:
    rotation = Rotation.of(LARGE, every=16)
    sizes = [sum(LARGE[index][1] for index in part) for part in rotation.parts]
    assert max(sizes) < 1.1 * min(sizes)


def test_every_step_may_read_all() -> None:
    rotation = Rotation.of(LARGE, every=1)
    assert rotation.reads_all
    assert rotation.read_at(11) == tuple(range(200))


def test_a_small_model_is_read_whole_in_each_step() -> None:
    rotation = Rotation.of([("weight", 400), ("bias", 40)], every=16)
    assert rotation.read_at(3) == (0, 1)
    assert rotation.reads_all


def test_the_order_of_tensors_does_not_change_what_a_step_reads() -> None:
    order = list(range(200))
    random.Random(1).shuffle(order)
    shuffled = [LARGE[index] for index in order]
    rotations = Rotation.of(LARGE, every=16), Rotation.of(shuffled, every=16)
    for step in range(40):
        names = [
            {tensors[index][0] for index in rotation.read_at(step)}
            for rotation, tensors in zip(rotations, (LARGE, shuffled), strict=True)
        ]
        assert names[0] == names[1]


def test_no_tensors_at_all_are_none() -> None:
    assert Rotation.of([], every=16).read_at(1) == ()
