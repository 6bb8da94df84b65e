"""Which parameters are taken for replicas, and after which steps they are compared."""

from __future__ import annotations

import pytest

from hashbench.extensions.ranks.replica_groups import replicas_of
from hashbench.extensions.ranks.replicas import ReplicasVerdict, check_replicas
from hashbench.extensions.ranks.text import check_finding
from tests.core.divergence.rank_runs import rank_traces

REDUCED = "g = all_reduce !g -> s phase=backward\n g = div_ !g (2) -> h phase=backward\n"

ADAM = """
    m = zeros_like parameter/w -> z phase=optimizer
    n = zeros_like parameter/w -> z phase=optimizer
    m = lerp_ !m g (0.1) -> m phase=optimizer
    n = mul_ !n (0.99) -> z phase=optimizer
    n = addcmul_ !n g g -> n phase=optimizer
    d = sqrt n -> d phase=optimizer
    d = add_ !d (1e-8) -> d phase=optimizer
    p = addcdiv_ !parameter/w m d -> p phase=optimizer
"""

MOMENTUM = """
    b = clone g -> b phase=optimizer
    b = mul_ !b (0.9) -> c phase=optimizer
    b = add_ !b g -> e phase=optimizer
    f = add g b -> f phase=optimizer
    p = add_ !parameter/w f -> p phase=optimizer
"""


def inferred(*lines: str) -> list[str]:
    """The parameters that are taken for replicas, of two ranks that run these lines."""
    return [name for _, name in replicas_of(rank_traces("\n".join(lines)))]


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_state_of_an_optimizer_that_came_from_a_reduced_gradient_makes_a_replica(optimizer: str) -> None:
    lines = "g = mm input/0 parameter/w -> {0} phase=backward\n{1}" + optimizer + "replica p p as w\n step\n"
    ranks = [f"rank {rank}:\n" + lines for rank in (0, 1)]
    assert inferred(*(text.format(f"g{rank}", REDUCED) for rank, text in enumerate(ranks))) == ["w"]
    assert inferred(*(text.format(f"g{rank}", "") for rank, text in enumerate(ranks))) == []


def test_a_parameter_that_is_averaged_and_steps_with_a_gradient_of_its_own_is_no_replica() -> None:
    lines = """
        p = all_reduce !parameter/w -> s
        p = div_ !p (2) -> h
        p = mul_ !p (0.99) -> i phase=optimizer
        p = add_ !p g -> p phase=optimizer
        replica p p as w
    """
    ranks = [f"rank {rank}:\n g = mm input/0 parameter/w -> g{rank} phase=backward\n{lines}" for rank in (0, 1)]
    assert inferred(*ranks) == []


def test_a_list_op_of_an_optimizer_writes_each_parameter_by_its_own_gradient() -> None:
    lines = """
        g = mm input/0 parameter/w -> g{0} phase=backward
        h = mm input/0 parameter/v -> h{0} phase=backward
        g = all_reduce !g -> s phase=backward
        p = _foreach_add_ 0.0=!parameter/w 0.1=!parameter/v 1.0=g 1.1=h -> p,v{0} phase=optimizer
        replica p p as w
        replica p v{0} as v
    """
    assert inferred(*(f"rank {rank}:\n" + lines.format(rank) for rank in (0, 1))) == ["w"]


def test_lists_of_an_optimizer_are_followed_from_place_to_place() -> None:
    lines = """
        g = mm input/0 parameter/w -> g{0} phase=backward
        h = mm input/0 parameter/v -> h{0} phase=backward
        g = all_reduce !g -> s phase=backward
        m = _foreach_lerp_ 0.0=!input/1 0.1=!input/2 1.0=g 1.1=h -> m,n{0} phase=optimizer
        p = _foreach_addcdiv_ 0.0=!parameter/w 0.1=!parameter/v 1.0=m 1.1=m -> p,v{0} phase=optimizer
        replica p p as w
        replica p v{0} as v
    """
    assert inferred(*(f"rank {rank}:\n" + lines.format(rank) for rank in (0, 1))) == ["w"]
    other = lines.replace("1.0=m 1.1=m", "1.0=m 1.1=g")
    assert inferred(*(f"rank {rank}:\n" + other.format(rank) for rank in (0, 1))) == ["v"]


def test_each_rank_s_own_part_of_a_reduced_gradient_makes_no_replica() -> None:
    lines = """
        g = mm input/0 parameter/w -> g{0}*8 phase=backward
        g = all_reduce !g -> s*8 phase=backward
        c = clone g+{1} -> c{1} phase=backward
        p = add_ !parameter/w c -> p{0} phase=optimizer
        replica p p{0} as w
    """
    assert inferred(*(f"rank {rank}:\n" + lines.format(rank, 4 * rank) for rank in (0, 1))) == []
    assert inferred(*(f"rank {rank}:\n" + lines.format(rank, 4) for rank in (0, 1))) == ["w"]


def test_a_reduced_number_that_scales_a_gradient_makes_no_replica() -> None:
    lines = """
        n = sum input/0 -> n{0}*1
        n = all_reduce !n -> n*1
        g = mm input/0 parameter/w -> g{0} phase=backward
        g = div_ !g n -> h{0} phase=backward
        p = add_ !parameter/w g -> p{0} phase=optimizer
        replica p p{0} as w
    """
    assert inferred(*(f"rank {rank}:\n" + lines.format(rank) for rank in (0, 1))) == []


@pytest.mark.parametrize("way", ["broadcast !p root=0 -> p", "copy_ !p input/1=p -> p"])
def test_a_share_that_is_replaced_before_anything_reads_it_is_compared_behind_that(way: str) -> None:
    lines = """
        rank {rank}:
        p = {step} !parameter/w=w -> {left} phase=optimizer
        replica p {left} as w 0-1
        step
        {before}
        y = mm p input/0 -> y{rank}
        p = {way}
        replica p p as w 0-1
    """
    ranks = ({"rank": 0, "step": "add_", "left": "p"}, {"rank": 1, "step": "id", "left": "w"})
    clean, stale = (
        "".join(lines.format(**one, way=way, before=before) for one in ranks) for before in (f"p = {way}", "")
    )
    assert check_replicas(rank_traces(clean)).equal
    assert [(one.name, one.step) for one in check_replicas(rank_traces(stale)).differing] == [("w", 0)]


def test_plain_parameters_that_part_though_nothing_reduces_them_are_told() -> None:
    lines = """
        rank {0}:
        w = empty -> blank
        w = uniform_ !w rng=1 -> w
        p = mul_ !w input/0 -> w{0} phase=optimizer
        p = add_ !p input/1 -> p{0} phase=optimizer
        q = add_ !parameter/v=v{0} input/0 -> q{0} phase=optimizer
        r = add_ !parameter/u=u input/0 -> {1} phase=optimizer
        s = add_ !parameter/x=x input/0 -> x{0} phase=optimizer
        replica p p{0} as w
        replica q q{0} as v
        replica r {1} as u
        replica s x{0} as x {2}
        step
    """
    verdict = check_replicas(rank_traces("".join(lines.format(rank, "u", "0-1") for rank in (0, 1))))
    assert verdict.uncompared == ("w",)
    assert check_replicas(rank_traces("".join(lines.format(rank, f"u{rank}", "") for rank in (0, 1)))).uncompared == (
        "w",
        "u",
        "x",
    )


def test_parameters_that_part_are_told_where_no_replica_differs() -> None:
    verdict = ReplicasVerdict(2, checked={(0, 1): 3}, uncompared=("w",))
    assert not verdict.equal
    found = check_finding(verdict)
    assert found.headline.startswith(
        "Replicas that are known agree, others that may be replicas do not: 3 parameters on"
    )
    assert dict(found.facts)["not compared"].startswith("w: equal on all ranks at first, and not later")


def test_a_plain_parameter_that_parts_in_a_later_step_is_told() -> None:
    lines = """
        rank {0}:
        p = add_ !parameter/w=w input/0 -> p phase=optimizer
        replica p p as w
        step
        p = add_ !p input/1 -> p{0} phase=optimizer
        replica p p{0} as w
        step
    """
    assert check_replicas(rank_traces("".join(lines.format(rank) for rank in (0, 1)))).uncompared == ("w",)


BESIDE = """
        rank {0}:
        p = add_ !parameter/w={1} input/0=x{0} -> {2} phase=optimizer
        beside p {2} as w 0-1
        q = add_ !parameter/v=v parameter/u -> q phase=optimizer
        replica q q as v 0-1
        step
"""


def test_plain_parameters_beside_dtensors_are_replicas_by_convention() -> None:
    alike = check_replicas(rank_traces(BESIDE.format(0, "w", "p") + BESIDE.format(1, "w", "p")))
    assert (alike.equal, alike.by_convention, alike.checked) == (True, ("w",), {(0, 1): 2})
    assert dict(check_finding(alike).facts)["convention"] == "w: a replica, as it is plain beside DTensors"
    apart = check_replicas(rank_traces(BESIDE.format(0, "w", "p0") + BESIDE.format(1, "w", "p1")))
    assert [(one.name, one.origin) for one in apart.differing] == [("w", "unreduced")]


def test_plain_parameters_beside_dtensors_that_differ_from_the_start_are_not_compared() -> None:
    """They may be the experts of each rank: nothing is blamed, and nothing is said to agree."""
    experts = check_replicas(rank_traces(BESIDE.format(0, "w0", "p0") + BESIDE.format(1, "w1", "p1")))
    assert (experts.equal, experts.differing, experts.by_convention) == (False, (), ())
    found = check_finding(experts)
    assert found.headline.startswith("Replicas that were compared agree: 1 parameter on ranks 0, 1")
    assert "w: beside DTensors, and different on each rank from the start" in " ".join(found.notes)


def test_an_op_of_an_optimizer_may_write_more_than_it_shows() -> None:
    """What its inner calls wrote is not shown again: nothing tells which of its outputs a gradient is for."""
    fused = " p = zoo.fused !parameter/w !other/m !other/n g phase=optimizer -> p,q\n"
    lines = f"{REDUCED}{fused} replica p p as w\n step\n"
    ranks = [f"rank {rank}:\n g = mm input/0 parameter/w -> g{rank} phase=backward\n {lines}" for rank in (0, 1)]
    assert inferred(*ranks) == ["w"]
    assert check_replicas(rank_traces("\n".join(ranks))).uncompared == ()
