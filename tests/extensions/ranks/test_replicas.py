"""Truth table of replicas: one run on several ranks, the parameters that differ, and why.

The first line of a case is its name and, behind a colon, the parameter that parts first: name, origin, rank and op.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import TracedRank
from hashbench.extensions.ranks.replicas import ReplicasVerdict, check_replicas
from hashbench.extensions.ranks.text import check_finding
from hashbench.extensions.ranks.whole_steps import cut_after
from tests.core.divergence.rank_runs import rank_traces

DATA_PARALLEL = """
        y = linear input/0={x} parameter/w=w -> {y}
        {local}
        g = mm y parameter/w -> {g} phase=backward
        {reduce}
        {extra}
        p = add_ !parameter/w g (0.1) -> {p} phase=optimizer
        {after}
        replica p {p} as w {ranks}
        step
"""

TABLE = """
replicas agree: agree
    {dp 0 ranks=0-1}
    {dp 1 ranks=0-1}

other batches, other ops and other seeds of dropout in front of the reduction: agree
    {dp 0 ranks=0-1 local="y = dropout y rng=1 -> d0"}
    {dp 1 ranks=0-1 local="y = gelu y rng=2 -> d1"}

a gradient that is not reduced: w unreduced 0 add_
    {dp 0 ranks=0-1 reduce="" p=p0}
    {dp 1 ranks=0-1 reduce="" p=p1}

a gradient that is reduced over another group: w unreduced 0 add_
    {dp 0 ranks=0-1 reduce="g = all_reduce !g group=0-2 -> s0" p=p0}
    {dp 1 ranks=0-1 reduce="g = all_reduce !g group=1-3 -> s1" p=p1}
    {dp 2 ranks=2-3 reduce="g = all_reduce !g group=0-2 -> s0"}
    {dp 3 ranks=2-3 reduce="g = all_reduce !g group=1-3 -> s1"}

a penalty on one rank behind the reduction: w sequence 1 mul
    {dp 0 ranks=0-1 p=p0}
    {dp 1 ranks=0-1 extra="n = mul parameter/w -> n phase=backward; g = add_ !g n -> e phase=backward" p=p1}

a kernel behind the reduction: w kernel 0 put
    {dp 0 ranks=0-1 extra="g = put g -> c0 phase=backward" p=p0}
    {dp 1 ranks=0-1 extra="g = put g -> c1 phase=backward" p=p1}

an argument of the optimizer: w outside 0 mul
    {dp 0 ranks=0-1 extra="g = mul g (2) -> c0 phase=backward" p=p0}
    {dp 1 ranks=0-1 extra="g = mul g (3) -> c1 phase=backward" p=p1}

one rank alone writes the parameter between two steps: w sequence 0 copy_
    rank 0:
        g = all_reduce !input/0=g0 -> s
        p = add_ !parameter/w=w g -> p phase=optimizer
        e = lerp_ !buffer/e=e p -> e1
        replica p p as w 0-1
        step
        p = copy_ !p e -> e1
        h = all_reduce !input/1=h0 -> t
        p = add_ !p h -> q0 phase=optimizer
        replica p q0 as w 0-1
        step
    rank 1:
        g = all_reduce !input/0=g1 -> s
        p = add_ !parameter/w=w g -> p phase=optimizer
        e = lerp_ !buffer/e=e p -> e1
        replica p p as w 0-1
        step
        h = all_reduce !input/1=h1 -> t
        p = add_ !p h -> q1 phase=optimizer
        replica p q1 as w 0-1
        step

dropout of one rank that has evaluated with dropout before: w rng 0 native_dropout
    rank 0:
        v = native_dropout input/1=v rng=1 -> v0
        v = mean v -> v1
        x = native_dropout input/0=x rng=2 -> x0
        y = mean x -> y0
        g = mm y input/0 -> g0 phase=backward
        p = add_ !parameter/w=w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        x = native_dropout input/0=x rng=1 -> x1
        y = mean x -> y1
        g = mm y input/0 -> g1 phase=backward
        p = add_ !parameter/w=w g -> p1 phase=optimizer
        replica p p1 as w 0-1

a parameter that one rank adds another one to, both drawn from equal seeds: w sequence 1 add_
    rank 0:
        v = uniform_ !input/1=v rng=1 -> v
        w = uniform_ !input/2=w rng=2 -> w
        p = add_ !w input/0=g -> p phase=optimizer
        replica p p as w 0-1
    rank 1:
        v = uniform_ !input/1=v rng=1 -> v
        w = uniform_ !input/2=w rng=2 -> w
        w = add_ !w v -> x
        p = add_ !w input/0=g -> p1 phase=optimizer
        replica p p1 as w 0-1

noise behind the reduction from other generators: w rng 0 normal
    {dp 0 ranks=0-1 extra="n = normal g rng=1 -> n0; g = add_ !g n -> c0 phase=backward" p=p0}
    {dp 1 ranks=0-1 extra="n = normal g rng=2 -> n1; g = add_ !g n -> c1 phase=backward" p=p1}

a gradient that nobody reduces, of a batch that each rank draws: w unreduced 0 add_
    rank 0:
        x = randn rng=1 -> x0
        g = mm x input/0 -> g0 phase=backward
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        x = randn rng=2 -> x1
        g = mm x input/0 -> g1 phase=backward
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

dropout of equal data from other generators: w rng 0 native_dropout
    rank 0:
        x = native_dropout input/0 rng=1 -> x0
        g = mm x input/0 -> g0 phase=backward
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        x = native_dropout input/0 rng=2 -> x1
        g = mm x input/0 -> g1 phase=backward
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

a kernel behind an op that is told by the collective inside: w kernel 0 put
    rank 0:
        c = all_reduce !input/0=x -> s in=symm_mem.memcpy_to_multicast_.default
        g = mystery !input/1=y inside=c -> t
        g = put g -> g0
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        c = all_reduce !input/0=z -> s in=symm_mem.memcpy_to_multicast_.default
        g = mystery !input/1=y inside=c -> t
        g = put g -> g1
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

a guilty collective inside an op that is told by it: w collective 0 c10d.allreduce_
    rank 0:
        c = all_reduce !input/0=x -> s0 in=symm_mem.memcpy_to_multicast_.default
        g = mystery !input/1=y inside=c -> t0
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        c = all_reduce !input/0=z -> s1 in=symm_mem.memcpy_to_multicast_.default
        g = mystery !input/1=y inside=c -> t1
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

a collective that left different content: w collective 0 c10d.allreduce_
    {dp 0 ranks=0-1 reduce="g = all_reduce !g -> s0" p=p0}
    {dp 1 ranks=0-1 reduce="g = all_reduce !g -> s1" p=p1}

an argument behind a part of memory of which another part differs: w outside 0 mul
    rank 0:
        b = mm input/0=x parameter/v -> b0*8 phase=backward
        g = mm input/0 parameter/w -> g0 phase=backward
        g = all_reduce !g -> s phase=backward
        b = copy_ !b g -> s phase=backward
        c = mul b (2) -> c0 phase=backward
        p = add_ !parameter/w c -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        b = mm input/0=z parameter/v -> b1*8 phase=backward
        g = mm input/0 parameter/w -> g1 phase=backward
        g = all_reduce !g -> s phase=backward
        b = copy_ !b g -> s phase=backward
        c = mul b (3) -> c1 phase=backward
        p = add_ !parameter/w c -> p1 phase=optimizer
        replica p p1 as w 0-1

a parameter that is modified outside the dispatcher: w outside 0 add_
    {dp 0 ranks=0-1}
    {dp 1 ranks=0-1 result=q}

a parameter from another seed: w rng 0 uniform_
    rank 0:
        w = empty -> blank
        w = uniform_ !w rng=1 -> u0
        replica w u0 as w 0-1
        step
    rank 1:
        w = empty -> blank
        w = uniform_ !w rng=2 -> u1
        replica w u1 as w 0-1
        step

a parameter that differs when it is first read: w state 0 nothing
    rank 0:
        p = add_ !parameter/w=a input/0 -> p0 phase=optimizer
        replica p p0 as w 0-1
        step
    rank 1:
        p = add_ !parameter/w=b input/0 -> p1 phase=optimizer
        replica p p1 as w 0-1
        step

parameters that are broadcast before the first step: agree
    rank 0:
        p = broadcast !parameter/w=a root=0 -> a
        p = add_ !p input/0 -> p phase=optimizer
        replica p p as w 0-1
        step
    rank 1:
        p = broadcast !parameter/w=b root=0 -> a
        p = add_ !p input/0 -> p phase=optimizer
        replica p p as w 0-1
        step

a gradient of each rank's own part of the sequence: w unreduced 0 add_
    rank 0:
        slice input/0=x (0)
        g = layer_norm_backward input/0 -> g0 phase=backward
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        slice input/0=x (4)
        g = layer_norm_backward input/0+4 -> g1 phase=backward
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

a gradient of what a reduction scattered: w unreduced 0 add_
    rank 0:
        y = reduce_scatter !input/9 input/0=x -> y0
        g = layer_norm_backward y -> g0 phase=backward
        p = add_ !parameter/w g -> p0 phase=optimizer
        replica p p0 as w 0-1
    rank 1:
        y = reduce_scatter !input/9 input/0=z -> y1
        g = layer_norm_backward y -> g1 phase=backward
        p = add_ !parameter/w g -> p1 phase=optimizer
        replica p p1 as w 0-1

nothing is known, and the gradient is reduced: w kernel 0 div
    {dp 0 extra="g = div g -> c0 phase=backward" p=p0}
    {dp 1 extra="g = div g -> c1 phase=backward" p=p1}

nothing is known, and the gradient is not reduced: unknown
    {dp 0 reduce="" p=p0}
    {dp 1 reduce="" p=p1}

sharded parameters and buffers of each rank: agree
    rank 0:
        p = add_ !parameter/w=a input/0=x -> p0 phase=optimizer
        b = add_ !buffer/mean input/0 -> b0
        q = add_ !parameter/v=v parameter/u -> q phase=optimizer
        replica p p0 as w
        result b b0 as mean
        replica q q as v 0-1
    rank 1:
        p = add_ !parameter/w=b input/0=z -> p1 phase=optimizer
        b = add_ !buffer/mean input/0 -> b1
        q = add_ !parameter/v=v parameter/u -> q phase=optimizer
        replica p p1 as w
        result b b1 as mean
        replica q q as v 0-1
"""


def expanded(line: str) -> str:
    """A line ``{dp RANK name=value …}`` as the lines of a rank of data-parallel training."""
    head, *rest = line.strip().strip("{}").split(" ", 2)
    assert head == "dp"
    rank, values = rest[0], rest[1] if len(rest) > 1 else ""
    named = {"x": f"x{rank}", "y": f"y{rank}", "g": f"g{rank}", "local": "", "ranks": "", "p": "p", "after": ""}
    named |= {"reduce": "g = all_reduce !g -> s phase=backward", "extra": ""}
    while values:
        name, _, after = values.partition("=")
        value, values = after[1:].split('"', 1) if after.startswith('"') else (after + " ").split(" ", 1)
        named[name.strip()] = value
    text = DATA_PARALLEL.format(**{name: value.replace("; ", "\n") for name, value in named.items()})
    if "result" in named:
        text = text.replace("replica p p ", f"replica p {named['result']} ")
    return f"rank {rank}:{text}"


class Case(NamedTuple):
    """A case of the table."""

    expected: str
    lines: str


def cases() -> dict[str, Case]:
    """The cases of the table by name."""
    found = {}
    for block in TABLE.strip().split("\n\n"):
        head, *lines = block.splitlines()
        name, _, expected = head.rpartition(": ")
        found[name] = Case(expected, "\n".join(expanded(x) if x.strip().startswith("{dp") else x for x in lines))
    return found


CASES = cases()


def words(verdict: ReplicasVerdict) -> str:
    if not verdict.differing:
        return "agree" if verdict.equal else "unknown"
    one = verdict.differing[0]
    kernel = one.kernel.removeprefix("aten.").removesuffix(".default") or "nothing"
    return f"{one.name} {one.origin} {one.rank} {kernel}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_origin_of_replicas_that_differ(case: Case) -> None:
    assert words(check_replicas(rank_traces(case.lines))) == case.expected


def three(*contents: str) -> str:
    ranks = "-".join(str(rank) for rank in range(len(contents)))
    extra = 'extra="g = put g -> {0} phase=backward"'
    return "\n".join(
        expanded(f"{{dp {rank} ranks={ranks} p={content} {extra.format(content)}}}")
        for rank, content in enumerate(contents)
    )


@pytest.mark.parametrize(
    ("contents", "minority", "compared"),
    [
        (("a", "b", "a"), (1,), (0, 1)),
        (("b", "a", "a", "a"), (0,), (1, 0)),
        (("b", "a", "a", "c"), (0, 3), (1, 0)),
        (("a", "b"), (), (0, 1)),
        (("a", "a", "b", "b"), (), (0, 2)),
        (("a", "b", "c"), (), (0, 1)),
    ],
)
def test_the_minority_is_named_from_three_ranks_on(
    contents: tuple[str, ...], minority: tuple[int, ...], compared: tuple[int, int]
) -> None:
    found = check_replicas(rank_traces(three(*contents))).differing[0]
    assert (found.minority, found.compared, found.origin) == (minority, compared, "kernel")
    assert found.rank == compared[bool(minority)]


def test_an_op_that_one_rank_has_more_and_other_inputs_are_reported_of_both_ranks() -> None:
    more = 'extra="n = mul parameter/w -> n phase=backward; g = add_ !g n -> e phase=backward"'
    lines = [expanded(f"{{dp {rank} ranks=0-1-2}}") for rank in (0, 1)]
    found = check_replicas(rank_traces("\n".join([*lines, expanded(f"{{dp 2 ranks=0-1-2 {more} p=p2}}")]))).differing[0]
    assert (found.minority, found.rank, found.detail) == ((2,), 2, "rank 2 runs this op, ranks 0, 1 do not")
    wired = """
        rank {0}:
        a = relu input/0 -> a
        b = gelu input/0 -> b
        p = add_ !parameter/w {1} -> p{0} phase=optimizer
        replica p p{0} as w 0-1
    """
    wired = wired.format(0, "a") + wired.format(1, "b")
    assert check_replicas(rank_traces(wired)).differing[0].detail == "rank 1 reads a different tensor here than rank 0"


def test_the_first_step_and_the_write_are_named() -> None:
    lines = {
        rank: f"""
    rank {rank}:
        p = add_ !parameter/w input/1 -> p phase=optimizer
        q = add_ !parameter/v input/1 -> q phase=optimizer
        replica p p as w 0-1
        replica q q as v 0-1
        step
        q = mul_ !q (0.9) -> r phase=optimizer
        q = add_ !q input/0={"xz"[rank]} -> {"xz"[rank]} phase=optimizer
        replica p p as w 0-1
        replica q {"xz"[rank]} as v 0-1
        step
        p = add_ !p q -> {"ab"[rank]} phase=optimizer
        replica p {"ab"[rank]} as w 0-1
        replica q {"xz"[rank]} as v 0-1
        step
    """
        for rank in (0, 1)
    }
    verdict = check_replicas(rank_traces("".join(lines.values())))
    assert [(one.name, one.step, one.origin) for one in verdict.differing] == [("v", 1, "unreduced"), ("w", 2, "")]
    assert verdict.differing[0].written_by == "optimizer.0/Net/aten.add_.default#2"
    assert verdict.steps == (0, 2)
    assert verdict.checked == {(0, 1): 2}


def test_a_reduced_gradient_makes_a_replica_and_is_told_so() -> None:
    verdict = check_replicas(rank_traces(expanded("{dp 0}") + expanded("{dp 1}")))
    assert verdict.equal
    assert verdict.inferred == ("w",)


def test_a_missing_rank_is_never_equal() -> None:
    traces = rank_traces(three("a", "a", "a"))
    verdict = check_replicas({rank: traces[rank] for rank in (0, 2)})
    assert (verdict.equal, verdict.missing, verdict.differing) == (False, (1,), ())
    assert verdict.checked == {(0, 2): 1}


def test_a_rank_that_ended_is_checked_up_to_the_last_whole_step() -> None:
    lines = "rank {0}:\n p = add_ !parameter/w input/1 -> p\n replica p p as w 0-1\n step\n"
    lines += " p = add_ !p input/0 -> q{0}\n replica p q{0} as w 0-1\n step\n"
    traces = dict(rank_traces(lines.format(0) + lines.format(1)))
    assert check_replicas(traces).differing
    traces[1] = replace(cut_after(traces[1], 0), rank=TracedRank(1, 2, "SIGKILL"))
    verdict = check_replicas(traces)
    assert (verdict.equal, verdict.differing, verdict.steps) == (False, (), (0, 0))
    assert verdict.unknown[0] == "Rank 1 ended early after step 0: SIGKILL."


def test_replicas_are_compared_behind_the_last_step_too() -> None:
    lines = "rank {0}:\n p = add_ !parameter/w input/1 -> p\n replica p p as w 0-1\n step\n"
    lines += " p = add_ !p input/0 -> q{0}\n replica p q{0} as w 0-1\n"
    (found,) = check_replicas(rank_traces(lines.format(0) + lines.format(1))).differing
    assert (found.name, found.step) == ("w", None)


def test_replicas_whose_groups_are_gone_at_the_end_are_replicas() -> None:
    lines = "rank {0}:\n p = add_ !parameter/w input/1 -> p\n replica p p as w 0-1\n step\n replica p p as w\n"
    verdict = check_replicas(rank_traces(lines.format(0) + lines.format(1)))
    assert (verdict.equal, verdict.checked) == (True, {(0, 1): 1})


def test_replicas_of_ranks_with_other_numbers_of_steps_are_compared_at_the_end() -> None:
    lines = "rank {0}:\n p = add_ !parameter/w input/1 -> p\n replica p p as w 0-1\n step\n"
    more = " p = add_ !p input/1 -> q\n replica p q as w 0-1\n step\n"
    last = " p = broadcast !p root=0 -> {0}\n replica p {0} as w 0-1\n"
    equal, other = (
        check_replicas(rank_traces(lines.format(0) + more + last.format("r") + lines.format(1) + last.format(end)))
        for end in ("r", "x")
    )
    assert (equal.equal, equal.steps) == (True, (0, 1))
    assert [(one.name, one.step) for one in other.differing] == [("w", None)]


@pytest.mark.parametrize("count", [0, 1])
def test_replicas_need_two_ranks(count: int) -> None:
    traces = rank_traces(three("a", "a"))
    with pytest.raises(HashbenchError, match="no replicas to compare"):
        check_replicas({rank: traces[rank] for rank in range(count)})


def test_nothing_known_of_any_parameter_is_said() -> None:
    verdict = check_replicas(rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r"))
    assert not verdict.equal
    assert verdict.unknown == ("No parameter is known to be a replica: nothing was compared.",)


LOCAL = """
        g = mm input/0=x{0} parameter/w=w -> g{0} phase=backward
        p = add_ !parameter/w g -> a{0} phase=optimizer
        replica p a{0} as w 0-1
        step
        y = mm p input/1 -> y{0}
        {average}
        g = mm y p -> h{0} phase=backward
        p = add_ !p g -> b{0} phase=optimizer
        replica p b{0} as w 0-1
        step
        y = mm p input/1 -> z{0}
        {last}
        replica p {left} as w 0-1
"""
AVERAGE = "p = all_reduce !p -> s; p = div_ !p (2) -> m"
FLAT = "f = cat p -> f{0}*4; f = all_reduce !f -> s*4; p = div_ !f (2) -> m*4"


@pytest.mark.parametrize(
    ("average", "last", "left", "again"),
    [
        (AVERAGE, "p = all_reduce !p -> e", "e", (1, None)),
        (FLAT, "", "b{0}", (1,)),
        ("p = broadcast !p root=0 -> m", "", "b{0}", (1,)),
    ],
    ids=["each by itself", "in one tensor", "as the first rank has it"],
)
def test_local_steps_between_averages_are_no_difference(
    average: str, last: str, left: str, again: tuple[int | None, ...]
) -> None:
    lines = LOCAL.format("{0}", average=average, last=last, left=left).replace("; ", "\n")
    verdict = check_replicas(rank_traces("".join(f"rank {rank}:{lines.format(rank)}" for rank in (0, 1))))
    assert [(one.name, one.again) for one in verdict.local] == [("w", again)]
    assert (verdict.equal, verdict.differing) == (True, ())
    found = check_finding(verdict)
    assert found.headline.startswith(
        "Replicas agree where they are made equal: 1 parameter on ranks 0, 1, steps 0 to 1"
    )
    assert dict(found.facts)["local steps"].startswith("w: apart in between, made equal on all ranks before step 1")


def test_replicas_that_nothing_makes_equal_again_differ_from_the_first_step_on() -> None:
    lines = LOCAL.format("{0}", average="", last="", left="b{0}")
    (found,) = check_replicas(rank_traces("".join(f"rank {rank}:{lines.format(rank)}" for rank in (0, 1)))).differing
    assert (found.step, found.origin) == (0, "unreduced")


def test_local_steps_that_go_on_for_longer_than_before_differ() -> None:
    more = """
        y = mm p input/1 -> c{0}
        p = add_ !p y -> d{0} phase=optimizer
        replica p d{0} as w 0-1
        step
        """
    lines = LOCAL.format("{0}", average=AVERAGE, last=more, left="d{0}").replace("; ", "\n")
    verdict = check_replicas(rank_traces("".join(f"rank {rank}:{lines.format(rank)}" for rank in (0, 1))))
    assert [(one.step, one.origin) for one in verdict.differing] == [(2, "unreduced")]
    assert verdict.local == ()


def test_what_one_rank_alone_did_differs_although_the_ranks_are_made_equal_later() -> None:
    lines = LOCAL.format("{0}", average=AVERAGE, last="p = all_reduce !p -> e", left="e").replace("; ", "\n")
    lines = lines.replace("g = mm input/0=x{0} parameter/w=w -> g{0}", "g = mm input/0=x parameter/w=w -> g\n{only}")
    lone = "g = clamp_ !g -> g1 phase=backward"
    ranks = (f"rank {rank}:{lines.format(rank, only=lone if rank else '')}" for rank in (0, 1))
    (found,) = check_replicas(rank_traces("".join(ranks))).differing
    assert (found.step, found.origin, found.rank) == (0, "sequence", 1)
