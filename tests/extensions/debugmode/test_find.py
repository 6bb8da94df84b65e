"""The verdict on two logs of DebugMode: a truth table on logs written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.errors import HashbenchError
from hashbench.extensions.debugmode.find import INPUTS_UNKNOWN, NOT_LOGGED, LogVerdict, find
from hashbench.extensions.debugmode.log import loads
from hashbench.extensions.debugmode.text import finding_of
from tests.extensions.debugmode.debug_logs import Entry, annotate, document, empty, kernel, log, op, redistribute
from tests.fuzzing import damaged

NAN = float("nan")
RANDOM = {"aten::rand", "aten::bernoulli_.float"}
GATHER, WAIT = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::wait_tensor"


def verdict(first: list[Entry], second: list[Entry]) -> LogVerdict:
    return find(log(*first), log(*second), is_random=RANDOM.__contains__)


def _net(weight: float = 1.0, hidden: float = 2.0, output: float = 3.0, *, unhashed: bool = False) -> list[Entry]:
    """Three ops of a chain: ``t`` of a weight, ``mm`` and ``relu``, whose outputs have these hashes."""
    return [
        op("t", weight, left=weight, unhashed=unhashed),
        op("mm", 9.0, weight, left=hidden, unhashed=unhashed),
        op("relu", hidden, left=output, unhashed=unhashed),
    ]


CLONE, DETACH = op("clone", 2.0, left=2.0), op("detach", 2.0, left=2.0)

BLAMED: dict[str, tuple[list[Entry], list[Entry], str, str]] = {
    "a kernel": (_net(), _net(hidden=2.5, output=3.5), Origin.KERNEL, "/aten::mm#0"),
    "an input of the program": (_net(), _net(weight=1.5, hidden=2.5, output=3.5), NOT_LOGGED, "/aten::t#0"),
    "a kernel or what it reads": (
        _net(unhashed=True),
        _net(hidden=2.5, output=3.5, unhashed=True),
        INPUTS_UNKNOWN,
        "/aten::mm#0",
    ),
    "an argument": (
        [op("add_.Tensor", 1.0, args_str="t: f32[2], alpha=0.1")],
        [op("add_.Tensor", 1.0, args_str="t: f32[2], alpha=0.2", left=1.5)],
        Origin.OUTSIDE,
        "/aten::add_.Tensor#0",
    ),
    "another redistribution": (
        [redistribute("S(0)", "R"), *_net()],
        [redistribute("S(1)", "R"), *_net()],
        Origin.OUTSIDE,
        "/redistribute_input#0",
    ),
    "a generator": ([op("rand", left=1.0)], [op("rand", left=2.0)], Origin.RNG, "/aten::rand#0"),
    "a draw that one run has more": (
        [op("bernoulli_.float", 7.0, left=1.0), *_net()],
        [op("rand", left=0.5), op("bernoulli_.float", 7.0, left=2.0), *_net()],
        Origin.SEQUENCE,
        "/aten::rand#0",
    ),
    "a draw that changes a mask of the same norm": (
        [op("bernoulli_.float", 7.0, left=6.0), *_net()],
        [op("rand", left=2.0), op("bernoulli_.float", 8.0, left=6.0), *_net(hidden=2.5, output=3.5)],
        Origin.SEQUENCE,
        "/aten::rand#0",
    ),
    "calls of one run alone, whatever they left": (
        _net()[:2],
        [*_net()[:2], CLONE, DETACH],
        Origin.SEQUENCE,
        "/aten::clone#0",
    ),
    "a call that one run has less": (
        [*_net()[:1], op("abs", 1.0, left=7.0), op("mm", 7.0, left=5.0)],
        [*_net()[:1], op("mm", 1.0, left=6.0)],
        Origin.SEQUENCE,
        "/aten::abs#0",
    ),
    "a kernel behind calls of one run alone": (
        [*_net()],
        [_net()[0], CLONE, *_net(hidden=2.5, output=3.5)[1:]],
        Origin.KERNEL,
        "/aten::mm#0",
    ),
    "an input behind calls of one run alone": (
        [*_net()],
        [CLONE, *_net(weight=1.5, hidden=2.5, output=3.5)],
        NOT_LOGGED,
        "/aten::t#0",
    ),
    "without inputs the first in order": (
        _net(unhashed=True),
        [op("clone", 1.0, unhashed=True), *_net(hidden=2.5, unhashed=True)],
        Origin.SEQUENCE,
        "/aten::clone#0",
    ),
    "what other ranks sent": (
        [op(GATHER, 1.0, left=0.0), op(WAIT, 0.0, left=4.0), op("mm", 4.0, left=5.0)],
        [op(GATHER, 1.0, left=4.5), op(WAIT, 4.5, left=4.5), op("mm", 4.5, left=5.5)],
        Origin.RANKS,
        f"/{WAIT}#0",
    ),
    "a reader of what was received": (
        [op("c10d::allreduce_", 1.0, left=4.0), op("mm", 4.0, left=5.0)],
        [op("c10d::allreduce_", 1.0, left=4.5), op("mm", 4.5, left=5.5)],
        Origin.RANKS,
        "/c10d::allreduce_#0",
    ),
    "anything behind a collective, without inputs": (
        [op(WAIT, 1.0, unhashed=True), *_net(unhashed=True)],
        [op(WAIT, 1.0, unhashed=True), *_net(hidden=2.5, unhashed=True)],
        Origin.RANKS,
        f"/{WAIT}#0",
    ),
    "a kernel behind a collective": (
        [op(WAIT, 1.0), *_net()],
        [op(WAIT, 1.0), *_net(hidden=2.5)],
        Origin.KERNEL,
        "/aten::mm#0",
    ),
    "a Triton kernel": (
        [kernel("fused", {"in_ptr0": 1.0, "out_ptr0": 7.0}, {"in_ptr0": 1.0, "out_ptr0": 2.0})],
        [kernel("fused", {"in_ptr0": 1.0, "out_ptr0": 8.0}, {"in_ptr0": 1.0, "out_ptr0": 3.0})],
        Origin.KERNEL,
        "/fused#0",
    ),
    "an input behind an xor of 0": ([op("mm", 0, left=1)], [op("mm", 0, left=2)], INPUTS_UNKNOWN, "/aten::mm#0"),
    "a kernel by one of two functions": (
        [op("mm", (2.0, 0), left=1)],
        [op("mm", (2.0, 0), left=2)],
        Origin.KERNEL,
        "/aten::mm#0",
    ),
    "an input behind NaN": ([op("mm", NAN, left=1.0)], [op("mm", NAN, left=2.0)], INPUTS_UNKNOWN, "/aten::mm#0"),
}


@pytest.mark.parametrize(("first", "second", "origin", "node"), BLAMED.values(), ids=BLAMED.keys())
def test_blamed_is(first: list[Entry], second: list[Entry], origin: str, node: str) -> None:
    found = verdict(first, second)
    assert found.divergence is not None
    assert (found.divergence.origin, found.divergence.node) == (origin, node)
    assert not found.equal
    back = verdict(second, first).divergence
    assert back is not None
    assert (back.origin, back.node) == (origin, node)


CLEAN: dict[str, tuple[list[Entry], list[Entry]]] = {
    "the same": (_net(), _net()),
    "fresh memory": (
        [empty(), op("fill_.Scalar", 7.0, left=2.0), *_net()],
        [empty(), op("fill_.Scalar", 8.0, left=2.0), *_net()],
    ),
    "data that had not come": (
        [op(GATHER, 1.0, left=0.0), op(WAIT, 0.0, left=4.0), op("mm", 4.0)],
        [op(GATHER, 1.0, left=4.0), op(WAIT, 4.0, left=4.0), op("mm", 4.0)],
    ),
    "a kernel's output buffer": (
        [kernel("k", {"in_ptr0": 1.0, "y": 7.0}, {"in_ptr0": 1.0, "y": 2.0})],
        [kernel("k", {"in_ptr0": 1.0, "y": 8.0}, {"in_ptr0": 1.0, "y": 2.0})],
    ),
}


@pytest.mark.parametrize(("first", "second"), CLEAN.values(), ids=CLEAN.keys())
def test_nothing_differs_in(first: list[Entry], second: list[Entry]) -> None:
    found = verdict(first, second)
    assert (found.divergence, found.equal) == (None, True)
    assert finding_of(found).headline.startswith("The logs agree: ")


def test_a_difference_that_no_call_leaves_is_benign_and_not_equal() -> None:
    found = verdict([op("relu", -1.0, left=0.0)], [op("relu", -2.0, left=0.0)])
    assert found.divergence is None
    assert found.benign == ("/aten::relu#0",)
    assert not found.equal
    assert finding_of(found).headline.startswith("No call leaves anything else: 1 call; ")


def test_annotations_and_depths_are_benign() -> None:
    deeper = [annotate("step"), *({**entry, "call_depth": 2} for entry in _net())]
    found = verdict(_net(), deeper)
    assert found.divergence is None
    assert found.benign == ("/[record function] step#0", "/aten::t#0", "/aten::mm#0", "/aten::relu#0")
    assert not found.equal


def test_inputs_hashed_in_one_run_are_not_compared() -> None:
    found = verdict(_net(), _net(unhashed=True))
    assert (found.equal, found.hashes) == (True, (3, 0, 0))
    assert verdict(_net(), _net(hidden=2.5, unhashed=True)).divergence is not None


@pytest.mark.parametrize("missing", ["hash", "input_hash"])
def test_a_hash_of_one_run_alone_is_no_agreement(missing: str) -> None:
    lacking = _net()
    lacking[1]["log"]["items"] = [item for item in lacking[1]["log"]["items"] if item[0] != missing]
    found = verdict(_net(), lacking)
    assert not found.equal
    assert found.benign == ("/aten::mm#0",)


def test_further_differences_are_told_apart() -> None:
    first = [*_net(), op("sin", 4.0, left=5.0), op("cos", 6.0, left=7.0)]
    second = [*_net(hidden=2.5, output=3.5), op("sin", 4.0, left=5.5), op("cos", 6.0, left=7.0)]
    found = verdict(first, second)
    assert found.later == ("/aten::relu#0", "/aten::sin#0")
    assert found.independent == ("/aten::sin#0",)
    assert found.unread == ("/aten::relu#0", "/aten::sin#0")


def test_a_number_in_words_that_differs_before_is_told() -> None:
    first = [op("item", 1.0, left=None, output_str="  ->  0.4"), *_net()]
    second = [op("item", 1.5, left=None, output_str="  ->  0.6"), op("abs", 8.0), *_net()]
    found = verdict(first, second).divergence
    assert found is not None
    assert found.node == "/aten::item#0"  # it read something else, and comes first
    second[0] = op("item", 1.0, left=None, output_str="  ->  0.6")
    first.insert(1, op("add", 1.0, args_str="t: f32[2], 0.4"))
    second.insert(1, op("add", 1.0, left=9.0, args_str="t: f32[2], 0.6"))
    assert verdict(first, second).later == ("/aten::add#0",)


# ------------------------------------------------------------------------------------ pytorch#168974: 29 and 31 calls


def _step(extra: bool, *, racy: float = 0.0) -> list[Entry]:
    """A training step of 29 calls; with ``extra`` of 31, two of them in the middle."""
    calls = [op(name, float(n), left=float(n + 1)) for n, name in enumerate(["t", "addmm", "relu"] * 9)]
    more = [op("clone", 13.0, left=13.0), op("detach", 13.0, left=13.0)] if extra else []
    return [
        *calls[:13],
        *more,
        *calls[13:],
        op("mse_loss", 27.0, left=28.0 + racy),
        op("mean", 28.0 + racy, left=29.0 + racy),
    ]


def test_runs_of_29_and_31_calls_are_aligned_and_compared() -> None:
    first, second = _step(extra=False), _step(extra=True)
    assert (len(first), len(second)) == (29, 31)
    found = verdict(first, second)
    shown = finding_of(found)
    assert found.divergence is not None
    assert (found.divergence.origin, found.divergence.node) == (Origin.SEQUENCE, "/aten::clone#0")
    assert dict(shown.facts)["second run alone"] == "2 calls: /aten::clone#0, /aten::detach#0"
    assert "Of 29 calls that both runs made, 29 can be compared and 29 left the same." in shown.notes
    differs = "the second run alone makes this call; of the others, all that both runs made agree"
    assert dict(shown.facts)["what differs"] == differs


def test_runs_of_29_and_31_calls_do_not_hide_a_kernel() -> None:
    found = verdict(_step(extra=False), _step(extra=True, racy=0.5))
    assert found.divergence is not None
    assert (found.divergence.origin, found.divergence.node) == (Origin.KERNEL, "/aten::mse_loss#0")
    assert dict(finding_of(found).facts)["second run alone"] == "2 calls: /aten::clone#0, /aten::detach#0"


# ----------------------------------------------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[list[Entry], list[Entry], str]] = {
    "an empty log": (_net(), [], "the second log is empty: nothing was compared, which is not the same as equal"),
    "hashes of other functions": (_net(), [op("t", 3, left=5), *_net()[1:]], "norm, and hash_tensor and norm"),
    "no hashes": ([op("mm", 1.0, log=None)], [op("mm", 1.0, log=None)], "what they computed was not compared"),
    "hashes of one run only": (
        _net(),
        [{**entry, "log": None} for entry in _net()],
        "what they computed was not compared",
    ),
    "hashes that say nothing": ([op("mm", NAN, left=NAN)], [op("mm", NAN, left=NAN)], "was not compared"),
}


@pytest.mark.parametrize(("first", "second", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_nothing_is_called_equal_of(first: list[Entry], second: list[Entry], reason: str) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(HashbenchError) as refused:
            verdict(one, other)
        assert reason in str(refused.value) or reason.startswith(("the second", "norm"))


def test_logs_without_hashes_still_tell_another_sequence() -> None:
    plain = [op(name, 1.0, log=None) for name in ("t", "mm", "relu")]
    found = verdict(plain, plain[:2])
    assert found.divergence is not None
    assert (found.divergence.origin, found.divergence.node) == (Origin.SEQUENCE, "/aten::relu#0")


# ------------------------------------------------------------------------------------------------------------ the text


def test_the_report_shows_the_call_its_neighbours_and_what_the_log_cannot_tell() -> None:
    found = finding_of(verdict(_net(), _net(hidden=2.5, output=3.5)), context=1)
    assert dict(found.facts) == {
        "first divergence": "/aten::mm#0",
        "origin": "kernel",
        "kernel": "aten::mm",
        "what differs": "the output differs, and all that it was given agrees by hash",
        "first run": "output: 2.0",
        "second run": "output: 2.5",
        "later": "1 call with a different output: /aten::relu#0",
        "unread": "1 differing output, read by no later call (results, or benign): /aten::relu#0",
    }
    assert found.table is not None
    assert [line for (line,) in found.table.rows] == [
        "    aten::t(t: f32[2]) -> t: f32[2]  # read [0: 1.0], left [1.0]",
        "-   aten::mm(t: f32[2], t: f32[2]) -> t: f32[2]  # read [0: 9.0, 1: 1.0], left [2.0]",
        "+   aten::mm(t: f32[2], t: f32[2]) -> t: f32[2]  # read [0: 9.0, 1: 1.0], left [2.5]",
        "-   aten::relu(t: f32[2]) -> t: f32[2]  # read [0: 2.0], left [3.0]",
        "+   aten::relu(t: f32[2]) -> t: f32[2]  # read [0: 2.5], left [3.5]",
    ]
    assert len(found.notes) == 3


def test_the_text_says_which_hashes_say_nothing() -> None:
    calls = [*_net(), op("mm", NAN, left=NAN)]
    assert (
        "5 of inputs, 2 of which (NaN, infinite, an xor of 0) say nothing" in finding_of(verdict(calls, calls)).headline
    )


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (_net(), "Equal L1 norms are no proof of equal tensors"),
        ([op("mm", 3, left=5)], "Equal values of hash_tensor are no proof of equal tensors"),
        (_net(unhashed=True), "Inputs were not hashed in both runs"),
        ([op(WAIT, 1.0), *_net()], "A collective is hashed when its call returns"),
    ],
    ids=["norm", "hash_tensor", "no inputs", "collectives"],
)
def test_what_a_log_cannot_tell_is_said(calls: list[Entry], said: str) -> None:
    found = finding_of(verdict(calls, calls))
    assert said in " ".join(found.notes)
    assert "equal:" not in str(found)


# -------------------------------------------------------------------------------------------------------- damaged logs


def test_a_damaged_log_never_agrees_with_the_sound_one() -> None:
    sound = document(
        *_net(), op("add.Tensor", 3.0, 1.5, left=(4.5, 2.5)), kernel("k", {"a": 4.5}, {"a": 4.5, "b": 6.5})
    )
    whole = loads(sound)
    agreed = 0
    for seed in range(20):
        for name, content in damaged(sound.encode(), seed=seed):
            try:
                read = loads(content.decode(errors="replace"))
                equal = find(whole, read).equal
            except HashbenchError:
                continue
            same = [replace(call, source="") for call in read.calls] == [
                replace(call, source="") for call in whole.calls
            ]
            assert equal is same, (name, read)
            agreed += equal
    assert agreed < 200  # of 2,600: white space, and names of fields that may be absent
