"""Small objects at random addresses, or contiguous from the start of a pool."""

from __future__ import annotations

import sys

import pytest

from hashbench.core.processes import new_python

ADDRESSES = """
from hashbench.core.run.addresses import arranged_addresses, scattered_addresses

kept = {how}()
objects = [bytes(63) for _ in range(100)]  # of 96 bytes each
steps = [id(after) - id(before) for before, after in zip(objects, objects[1:])]
print(sum(step == 96 for step in steps))
"""


def contiguous(how: str, monkeypatch: pytest.MonkeyPatch, *, hash_seed: str) -> int:
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    code = f"import sys; sys.path[:0] = {sys.path!r}\n" + ADDRESSES.format(how=how)
    done = new_python(code, seconds=60)
    assert done.status == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    ("how", "hash_seed", "in_a_row"),
    [
        pytest.param("scattered_addresses", "0", range(50), id="scattered"),
        pytest.param("arranged_addresses", "random", range(50), id="random string hashes"),
        pytest.param("arranged_addresses", "0", range(95, 100), id="fixed string hashes"),
    ],
)
def test_new_objects_are_contiguous_or_scattered(
    how: str, hash_seed: str, in_a_row: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contiguous(how, monkeypatch, hash_seed=hash_seed) in in_a_row
