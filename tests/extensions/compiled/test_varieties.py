"""What further compilations change."""

from __future__ import annotations

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled.varieties import VARIETIES, Cache, further


def test_order() -> None:
    assert [variety.name for variety in VARIETIES] == [
        "fresh cache",
        "warm cache",
        "fresh process",
        "compile threads",
        "max_autotune",
        "one thread",
    ]


@pytest.mark.parametrize("compilations", range(1, 8))
def test_first_ones_are_taken(compilations: int) -> None:
    assert further(compilations) == VARIETIES[: compilations - 1]


@pytest.mark.parametrize("compilations", [-1, 0, 2 + len(VARIETIES)])
def test_other_numbers_are_refused(compilations: int) -> None:
    with pytest.raises(
        HashbenchError, match=rf"--compilations {compilations} is not between 1 and {1 + len(VARIETIES)}"
    ):
        further(compilations)


def test_only_the_second_finds_what_was_compiled_before() -> None:
    assert [variety.name for variety in VARIETIES if variety.cache is Cache.WARM] == ["warm cache"]


def test_each_changes_something_of_its_own() -> None:
    changes = [(each.cache, dict(each.variables), each.options_beside(8)) for each in VARIETIES]
    assert len({repr(change) for change in changes}) == len(VARIETIES)
    assert [each.name for each in VARIETIES if each.in_fresh_process] == ["fresh process"]


@pytest.mark.parametrize(("threads", "other"), [(1, 2), (2, 1), (32, 1)])
def test_number_of_compile_threads_is_another(threads: int, other: int) -> None:
    options = {each.name: each.options_beside(threads) for each in VARIETIES}
    assert options.pop("compile threads") == {"compile_threads": other}
    assert options.pop("max_autotune") == {"max_autotune": True}
    assert options.pop("one thread") == {"cpp.threads": 1}
    assert set(map(len, options.values())) == {0}


@pytest.mark.slow
def test_options_exist_in_the_installed_torch() -> None:
    from torch._inductor import config

    for each in VARIETIES:
        with config.patch(each.options_beside(8)):
            pass
