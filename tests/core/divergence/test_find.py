"""The verdict on a pair of traces: which results it explains, what it refuses, and random programs."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import replace

import pytest

from hashbench.core.divergence import find
from hashbench.core.errors import HashbenchError
from hashbench.core.records import EarlyRead, Trace
from tests.core.divergence.runs import Run, judge


@pytest.mark.parametrize("empty", [0, 1], ids=["the first is empty", "the second is empty"])
def test_an_empty_trace_is_refused(empty: int) -> None:
    pair = [Run("relu input/0 -> r").trace() for _ in range(2)]
    pair[empty] = Trace(())
    with pytest.raises(HashbenchError, match="empty"):
        find(*pair)


CLOCK = "randperm rng=g|G -> p|P\nmul input/0 (1 | 2) => y|Y"


def test_a_value_behind_a_draw_may_come_from_elsewhere() -> None:
    pair = [Run(CLOCK, second=second).trace() for second in (False, True)]
    drawn, value = (find(*pair, draws_first=first).divergence for first in (True, False))
    assert drawn is not None
    assert value is not None
    assert drawn.kernel == "aten.randperm.default"
    assert drawn.detail == (
        "RNG state before this op differs. No op reads what aten.randperm.default drew, so "
        "Python may have: aten.mul.default behind it may follow from that, or from something else outside torch "
        "(a non-tensor argument differs: (1) and (2))"
    )
    assert (value.origin, value.kernel) == ("outside", "aten.mul.default")


EARLY = "x = relu input/0 -> r\nx = c10d.allreduce_.default !x -> a\n"


@pytest.mark.parametrize(
    ("lines", "early", "expected"),
    [
        pytest.param("sum x => s", (), "", id="no early read"),
        pytest.param("sum x => s", (0, 1), "ranks at forward.0/Net/aten.sum.default#0", id="in both runs"),
        pytest.param("sum x => s", (0,), "ranks at forward.0/Net/aten.sum.default#0", id="in the first"),
        pytest.param("sum x => s", (1,), "ranks at forward.0/Net/aten.sum.default#0", id="in the second"),
        pytest.param(
            "y = index_put input/1 -> p|P\nx = sum x -> s\nresult y p|P", (0, 1), "ranks at", id="beside a difference"
        ),
        pytest.param("2: t x\nsum x => s", (1,), "ranks at forward.0/Net/aten.sum.default#0", id="with another op"),
    ],
)
def test_an_early_read_is_a_divergence_of_equal_runs(lines: str, early: tuple[int, ...], expected: str) -> None:
    read = EarlyRead("forward.0/Net/c10d.allreduce_.default#0", "forward.0/Net/aten.sum.default#0", "train.py:3 step")
    pair = [Run(EARLY + lines, second=second).trace() for second in (False, True)]
    pair = [replace(trace, early_reads=(read,) if number in early else ()) for number, trace in enumerate(pair)]
    verdict = find(*pair)
    assert verdict.early_reads == ((read,) if early else ())
    if not expected:
        assert verdict.equal
        return
    assert verdict.divergence is not None
    assert not verdict.equal
    assert f"{verdict.divergence.origin} at {verdict.divergence.node}".startswith(expected)
    assert read.reader in str(verdict)
    if not verdict.differing:
        assert verdict.divergence.source == "train.py:3 step"


def test_without_results_the_first_differing_record_is_blamed() -> None:
    divergence = judge("x = relu input/0 -> r\ny = index_put x -> y|Y\nsum y -> s|S").divergence
    assert divergence is not None
    assert (divergence.origin, divergence.kernel) == ("kernel", "aten.index_put.default")


def test_equal_results_are_no_divergence() -> None:
    verdict = judge("x = rnn input/0 -> r,g|G\nresult x r")
    assert (verdict.differing, verdict.divergence) == ((), None)
    assert verdict.benign == ("forward.0/Net/aten.rnn.default#0",)


def test_the_caller_may_name_the_differing_results() -> None:
    trace = Run("relu input/0 => r").trace()
    verdict = find(trace, trace, differing=["output"])
    assert verdict.differing == ("output",)
    assert verdict.divergence is not None


@pytest.mark.slow
def test_a_chain_of_writes_takes_linear_time() -> None:
    def seconds(writes: int) -> float:
        lines = ["x = index_put input/0 -> a|A*100000"]
        lines += [f"x = copy_ !x+{offset} input/0 -> c*1" for offset in range(writes)]
        pair = [Run("\n".join([*lines, "sum x => s|S"]), second=second).trace() for second in (False, True)]
        times = []
        for _ in range(3):
            started = time.process_time()
            divergence = find(*pair).divergence
            times.append(time.process_time() - started)
        assert divergence is not None
        assert divergence.kernel == "aten.index_put.default"
        return min(times)

    assert seconds(8_000) < 8 * seconds(2_000)  # 4 times as long where time is linear, 16 times where it is quadratic


def random_program(rng: random.Random, *, noisy: int = -1, second: bool = False) -> tuple[Trace, list[str]]:
    """A random graph of ops whose contents follow from what they read, and its nodes in order; in the second run, op
    ``noisy`` errs. Views, in-place writes, and ops that round differences away occur."""
    run, nodes = Run(second=second), []
    contents = {f"input/{n}": f"x{n}" for n in range(3)}
    for name, content in contents.items():
        run.write(f"{name}={content}")
    alive = list(contents)
    for number in range(25):
        kind = rng.choice(["mul", "mul", "add_", "round", "detach"])
        read, other = rng.choice(alive), rng.choice(alive)
        if kind == "detach":
            run.write(f"view = detach {read}")
            nodes.append("")
            continue
        if kind == "add_" and read.startswith("input"):
            kind = "mul"
        of = str(number) if kind == "round" else f"{contents[read]}|{contents[other]}"
        content = hashlib.md5(f"{kind}|{of}".encode()).hexdigest()[:12] + "?" * (second and number == noisy)
        reads = {"mul": f"{read} {other}", "add_": f"!{read} {other}", "round": read}[kind]
        run.write(f"n{number} = {kind} {reads} -> {content}")
        if kind == "add_":
            alive.remove(read)
        contents[f"n{number}"] = content
        alive.append(f"n{number}")
        nodes.append(run.nodes[f"n{number}"])
    for number, name in enumerate(rng.sample(alive, 3)):
        run.write(f"result {name} {contents[name]} as output.{number}")
    return run.trace(), nodes


@pytest.mark.parametrize("seed", range(20))
def test_random_program_blames_the_op_that_erred(seed: int) -> None:
    blamed = 0
    for noisy in range(25):
        first, nodes = random_program(random.Random(seed), noisy=noisy)
        second, _ = random_program(random.Random(seed), noisy=noisy, second=True)
        differing = tuple(a.name for a, b in zip(first.results, second.results, strict=True) if a != b)
        verdict = find(first, second)
        assert verdict.differing == differing
        changed = [a.id for a, b in zip(first.records, second.records, strict=True) if a != b]
        if differing:
            assert verdict.divergence is not None
            assert (verdict.divergence.origin, verdict.divergence.node) == ("kernel", nodes[noisy])
            blamed += 1
        else:
            assert verdict.divergence is None
            assert list(verdict.benign) == changed
    assert blamed


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_swapped_get_the_same_verdict(seed: int) -> None:
    first, second = (random_program(random.Random(2 * seed + number))[0] for number in range(2))
    there, back = find(first, second), find(second, first)
    assert set(there.differing) == set(back.differing)
    assert there.divergence is not None
    assert back.divergence is not None
