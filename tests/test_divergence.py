"""The verdict on a pair, as a truth table over runs written by hand. No torch here: the decision needs none."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hashbench.divergence import find
from hashbench.errors import HashbenchError
from hashbench.records import Leaf, OpRecord, Ref, Result, SettingsMark, TensorDigest, Trace, Verdict


def tensor(content: str, size: int = 4, *, stride: int = 1, dtype: str = "float32") -> TensorDigest:
    """The digest of a tensor whose content is called ``content``; the empty text is memory nobody wrote."""
    return TensorDigest(dtype, (size,), (stride,), content)


def into(source: str, offset: int = 0, digest: str = "") -> Ref:
    """A read of memory that the op also writes."""
    return Ref("", source, offset, True, digest)


def seen(source: str, digest: str, offset: int = 0) -> Ref:
    """A read whose content was hashed just before the call (``hash_inputs``)."""
    return Ref("", source, offset, False, digest)


def _full(name: str) -> str:
    return name if "." in name or not name else f"aten.{name}.default"


class Run:
    """Writes the trace of one of the two runs. ``either`` is where they differ."""

    def __init__(self, *, second: bool) -> None:
        self.second = second
        self.records: list[OpRecord] = []
        self.leaves: list[Leaf] = []
        self.results: list[Result] = []
        self.marks: list[SettingsMark] = []
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.hashed = False

    def either(self, first: Any, second: Any) -> Any:
        return second if self.second else first

    def leaf(self, name: str, content: str | TensorDigest = "w", *, initial: str = "") -> str:
        found = tensor(content) if isinstance(content, str) else content
        self.leaves.append(Leaf(name, name.partition("/")[0], found, len(self.records), initial))
        return name

    def op(
        self,
        name: str,
        *reads: str | Ref,
        wrote: str | TensorDigest | tuple[TensorDigest, ...] | None = None,
        module: str = "Net",
        phase: str = "forward",
        **fields: Any,
    ) -> str:
        full = _full(name)
        key = (phase, module, full)
        record_id = f"{phase}.0/{module}/{full}#{self.counts[key]}"
        self.counts[key] += 1
        refs = [ref if isinstance(ref, Ref) else Ref("", ref) for ref in reads]
        inputs = tuple(ref._replace(argument=ref.argument or str(place)) for place, ref in enumerate(refs))
        outputs = () if wrote is None else wrote
        if isinstance(outputs, str):
            outputs = tensor(outputs)
        if isinstance(outputs, TensorDigest):
            outputs = (outputs,)
        self.records.append(OpRecord(record_id, phase, 0, module, full, inputs, outputs=outputs, **fields))
        return record_id

    def differing(self, name: str, *reads: str | Ref, **fields: Any) -> str:
        """An op that wrote something else in each run."""
        return self.op(name, *reads, wrote=self.either("y", "Y"), **fields)

    def ends_in(self, name: str, *reads: str | Ref, **fields: Any) -> str:
        """The op that wrote the result, something else in each run."""
        node = self.differing(name, *reads, **fields)
        self.result(node, self.either("y", "Y"))
        return node

    def view(self, name: str, source: str, arguments: str = "") -> str:
        """A view; what reads it reads ``source``, the last writer of the storage."""
        self.op(name, source, arguments=arguments)
        return source

    def empty(self, size: int = 4) -> str:
        return self.op("empty", wrote=tensor("", size), blank=True)

    def item(self, source: str, value: object) -> str:
        return self.op("_local_scalar_dense", source, scalar=repr(value))

    def result(self, source: str, content: str | TensorDigest, name: str = "output") -> None:
        found = tensor(content) if isinstance(content, str) else content
        self.results.append(Result(name, found, source))

    def python_result(self, value: object, name: str = "output") -> None:
        self.results.append(Result(name, TensorDigest(type(value).__name__, (), (), repr(value)), ""))

    def mark(self, label: str = "step", **settings: str) -> None:
        self.marks.append(SettingsMark(len(self.records), label, tuple(sorted(settings.items()))))

    def trace(self) -> Trace:
        return Trace(tuple(self.records), tuple(self.leaves), tuple(self.results), tuple(self.marks), self.hashed)


Scenario = Callable[[Run], None]


def judge(scenario: Scenario, *, swapped: bool = False) -> Verdict:
    """The verdict on the two runs of a scenario; ``swapped`` takes the second run as the first."""
    runs = Run(second=swapped), Run(second=not swapped)
    for run in runs:
        scenario(run)
    return find(runs[0].trace(), runs[1].trace())


class Case(NamedTuple):
    """A scenario and what must be said of it."""

    scenario: Scenario
    origin: str
    kernel: str
    benign: int
    either_order: bool
    fields: dict[str, Any]


CASES: list[Any] = []


def _steered_by(verdict: Verdict) -> tuple[str, str, str] | None:
    steering = verdict.divergence.steered_by if verdict.divergence is not None else None
    return None if steering is None else (steering.first, steering.second, steering.kernel)


def blames(
    origin: str, kernel: str = "", *, benign: int = 0, either_order: bool = True, **fields: Any
) -> Callable[[Scenario], Scenario]:
    """Enter a scenario into the truth table: its origin, the kernel blamed, and how many records are benign.

    ``either_order``: the same kernel is blamed when the second run is taken as the first.
    """

    def enter(scenario: Scenario) -> Scenario:
        case = Case(scenario, origin, _full(kernel), benign, either_order, fields)
        CASES.append(pytest.param(case, id=scenario.__name__.replace("_", " ").strip()))
        return scenario

    return enter


# ------------------------------------------------------------------------------------------ before the first op


@blames("input", "linear", node="input/0")
def model_input_differs(run: Run) -> None:
    x, w = run.leaf("input/0", run.either("x", "X")), run.leaf("parameter/Net.weight")
    run.ends_in("linear", x, w)


@blames("state", "linear", node="parameter/Net.weight")
def parameter_differs(run: Run) -> None:
    x, w = run.leaf("input/0", "x"), run.leaf("parameter/Net.weight", run.either("w", "W"))
    run.ends_in("linear", x, w)


@blames("state", "add", node="buffer/Net.mean")
def buffer_differs(run: Run) -> None:
    x, b = run.leaf("input/0", "x"), run.leaf("buffer/Net.mean", run.either("b", "B"))
    run.ends_in("add", x, b)


@blames("outside", "add", node="other/Net#0")
def tensor_from_outside_torch_differs(run: Run) -> None:
    x, o = run.leaf("input/0", "x"), run.leaf("other/Net#0", run.either("o", "O"))
    run.ends_in("add", x, o)


@blames("input", "linear")
def input_comes_before_a_parameter_that_differs_too(run: Run) -> None:
    w = run.leaf("parameter/Net.weight", run.either("w", "W"))
    x = run.leaf("input/0", run.either("x", "X"))
    run.ends_in("linear", w, x)


@blames("state", "mul", node="parameter/Net.weight")
def parameter_first_read_late_comes_before_a_kernel(run: Run) -> None:
    x = run.leaf("input/0", "x")
    y = run.differing("index_put", x)
    w = run.leaf("parameter/Net.weight", run.either("w", "W"))
    run.ends_in("mul", y, w)


@blames("input", "linear", node="input/0")
def input_comes_before_settings(run: Run) -> None:
    run.mark("start", threads=run.either("1", "2"))
    x = run.leaf("input/0", run.either("x", "X"))
    run.ends_in("linear", x)


@blames("kernel", "add", node="forward.0/Net/aten.add.default#0")
def input_that_differs_but_reaches_no_result(run: Run) -> None:
    run.leaf("input/1", run.either("x", "X"))
    y = run.differing("add", run.leaf("input/0", "x"))
    run.op("relu", "input/1", wrote="same")
    run.result(y, run.either("y", "Y"))


@blames("outside", "add", node="buffer/Net.mean", opaque_producer=True)
def leaf_changed_between_registration_and_first_read(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0", "x"), wrote="r")
    b = run.leaf("buffer/Net.mean", run.either("b", "B"), initial=run.either("", "b"))
    run.ends_in("add", x, b)


@blames("outside", "add", node="buffer/Net.mean", opaque_producer=True)
def leaf_changed_in_both_runs_to_something_else(run: Run) -> None:
    b = run.leaf("buffer/Net.mean", run.either("b1", "b2"), initial="b")
    run.ends_in("add", b)


# -------------------------------------------------------------------------------------------------- settings


@blames("settings", "sum", node="setting:threads")
def setting_differs_before_a_kernel(run: Run) -> None:
    run.mark("start", threads=run.either("2", "1"))
    run.ends_in("sum", run.leaf("input/0"))


@blames("settings", "sum", node="setting:threads")
def setting_changed_between_two_marks_around_a_kernel(run: Run) -> None:
    run.mark("start", threads="2")
    y = run.differing("sum", run.leaf("input/0"))
    run.mark("end", threads=run.either("2", "1"))
    run.result(y, run.either("y", "Y"))


@blames("kernel", "index_put")
def setting_changed_after_the_kernel_that_differed(run: Run) -> None:
    run.mark("start", threads="2")
    y = run.differing("index_put", run.leaf("input/0"))
    run.op("relu", run.leaf("input/1"), wrote="r")
    run.mark("step", threads="2")
    z = run.differing("relu", y)
    run.mark("end", threads=run.either("2", "1"))
    run.result(z, run.either("y", "Y"))


@blames("settings", "sum", node="setting:flag")
def setting_that_only_one_run_has(run: Run) -> None:
    run.mark("start", threads="2", **run.either({}, {"flag": "on"}))
    run.ends_in("sum", run.leaf("input/0"))


# ---------------------------------------------------------------------------------------------------- kernels


@blames("kernel", "index_put", op_index=1, module="Net.a", phase="backward", forward_op="f", source="a.py:1 f")
def kernel_differs_from_equal_inputs(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    common: dict[str, Any] = {"module": "Net.a", "phase": "backward", "forward_op": "f", "source": "a.py:1 f"}
    y = run.differing("index_put", x, **common)
    run.ends_in("sum", y)


@blames("kernel", "sort", detail="output 1 differs although every input is equal")
def second_output_of_a_kernel_differs(run: Run) -> None:
    y = run.op("sort", run.leaf("input/0"), wrote=(tensor("v"), tensor(run.either("i", "I"))))
    run.ends_in("gather", y)


@blames("kernel", "index_put", benign=1)
def of_two_differences_only_one_reaches_a_result(run: Run) -> None:
    x = run.leaf("input/0")
    run.differing("bincount", x)
    run.ends_in("index_put", x)


@blames("kernel", "index_put")
def of_two_differences_that_both_reach_the_first_is_blamed(run: Run) -> None:
    a = run.differing("index_put", run.leaf("input/0"))
    b = run.differing("put", run.leaf("input/1"))
    run.ends_in("add", a, b)


@blames("kernel", "put", benign=1)
def difference_that_is_rounded_away_is_not_blamed(run: Run) -> None:
    a = run.differing("index_put", run.leaf("input/0"))
    r = run.op("round", a, wrote="r")
    run.ends_in("put", r)


@blames("kernel", "index_put_")
def difference_that_travels_through_in_place_ops(run: Run) -> None:
    x = run.op("zeros", wrote="0")
    x = run.differing("index_put_", into(x), run.leaf("input/0"))
    x = run.differing("add_", into(x))
    run.ends_in("mul_", into(x))


@blames("kernel", "put", benign=1)
def difference_overwritten_in_place_is_not_blamed(run: Run) -> None:
    x = run.differing("index_put", run.leaf("input/0"))
    x = run.op("zero_", into(x), wrote="0")
    run.ends_in("put", x)


@blames("kernel", "index_put")
def difference_that_stays_beside_an_equal_write_into_part_of_the_tensor(run: Run) -> None:
    x = run.op("index_put", run.leaf("input/0"), wrote=tensor(run.either("a", "A"), 8))
    run.view("slice", x, "0, 0, 4")
    x = run.op("zero_", into(x), wrote=tensor("0", 4))
    run.ends_in("sum", x)


@blames("kernel", "index_put_")
def difference_written_into_part_of_a_tensor(run: Run) -> None:
    x = run.op("zeros", wrote=tensor("0", 8))
    run.view("slice", x, "0, 4, 8")
    x = run.op("index_put_", into(x, 4), wrote=tensor(run.either("a", "A"), 4))
    x = run.op("relu_", into(x, 0), wrote=tensor("r", 4))
    run.ends_in("sum", x)


@blames("kernel", "sort", detail="the output differs although every input is equal")
def only_the_stride_differs(run: Run) -> None:
    y = run.op("sort", run.leaf("input/0"), wrote=tensor("v", stride=run.either(1, 2)))
    run.result(y, tensor("v", stride=run.either(1, 2)))


@blames("kernel", "to")
def only_the_dtype_differs(run: Run) -> None:
    y = run.op("to", run.leaf("input/0"), wrote=tensor("v", dtype=run.either("float32", "int32")))
    run.result(y, tensor("v", dtype=run.either("float32", "int32")))


@blames("kernel", "index_put")
def optimizer_state_differs_and_the_loss_does_not(run: Run) -> None:
    g = run.differing("index_put", run.leaf("input/0"), phase="backward")
    state = run.op("_foreach_add_", into(run.leaf("other/#0", "m")), g, wrote=run.either("m", "M"), phase="optimizer")
    run.result(run.op("sum", "input/0", wrote="l"), "l", "loss")
    run.result(state, run.either("m", "M"), "optimizer.exp_avg")


@blames("kernel", "index_put")
def result_that_differs_beside_one_that_only_the_second_run_has(run: Run) -> None:
    y = run.ends_in("index_put", run.leaf("input/0"))
    if run.second:
        run.result(y, "Y", "extra")


# ----------------------------------------------------------------------------------------------------- random


@blames("rng", "native_dropout")
def generator_state_differs(run: Run) -> None:
    run.ends_in("native_dropout", run.leaf("input/0"), rng=run.either("g", "G"))


@blames("kernel", "sum")
def generator_state_that_changed_nothing(run: Run) -> None:
    y = run.op("native_dropout", run.leaf("input/0"), wrote="y", rng=run.either("g", "G"))
    run.ends_in("sum", y)


@blames("kernel", "native_dropout")
def seeded_op_differs_from_an_equal_generator_state(run: Run) -> None:
    run.ends_in("native_dropout", run.leaf("input/0"), rng="g")


@blames("sequence", "rand", benign=1)
def extra_draw_that_shifts_the_generator_for_later_ops(run: Run) -> None:
    if run.second:
        run.op("rand", wrote="n", rng="g0")
    x = run.differing("bernoulli", run.leaf("input/0"), rng=run.either("g0", "g1"))
    y = run.differing("bernoulli", "input/0", rng=run.either("g1", "g2"))
    run.op("relu", x, wrote="r")
    run.result(y, run.either("y", "Y"))


@blames("rng", "bernoulli", benign=1)
def extra_draw_from_another_generator_is_not_blamed(run: Run) -> None:
    if run.second:
        run.op("rand", wrote="n", rng="private")
    run.ends_in("bernoulli", run.leaf("input/0"), rng=run.either("g", "G"))


# ---------------------------------------------------------------------------------------------------- outside


@blames("outside", "mul", first="(0.1)", second="(0.2)")
def argument_that_is_not_a_tensor_differs(run: Run) -> None:
    run.ends_in("mul", run.leaf("input/0"), arguments=run.either("0.1", "0.2"))


@blames("kernel", "index_put")
def argument_that_changes_nothing(run: Run) -> None:
    y = run.op("mul", run.leaf("input/0"), arguments=run.either("0.1", "0.2"), wrote="y")
    run.ends_in("index_put", y)


@blames("outside", "slice", first="(0, 0, 2)", second="(0, 2, 4)")
def view_is_taken_of_another_part(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.view("slice", x, run.either("0, 0, 2", "0, 2, 4"))
    run.ends_in("sum", Ref("", x, run.either(0, 2)))


@blames("outside", "permute")
def view_is_taken_in_another_order_at_the_same_offset(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.view("permute", x, run.either("[0, 1]", "[1, 0]"))
    run.ends_in("mm", x)


@blames("kernel", "mv")
def view_is_taken_at_another_place_where_the_same_was_read(run: Run) -> None:
    run.hashed = True
    pool = run.leaf("buffer/Net.pool", "p")
    run.op("slice", seen(pool, "p"), arguments=run.either("0, 4", "2, 6"))
    filled = run.op("copy_", into(pool, run.either(0, 2), digest=run.either("a", "b")), wrote="x")
    run.op("slice", seen(filled, run.either("p1", "p2")), arguments=run.either("0, 4", "2, 6"))
    run.ends_in("mv", seen(filled, "x", run.either(0, 2)))


@blames("outside", "slice")
def view_is_taken_at_another_place_where_something_else_was_read(run: Run) -> None:
    run.hashed = True
    pool = run.leaf("buffer/Net.pool", "p")
    run.op("slice", seen(pool, "p"), arguments=run.either("0, 4", "2, 6"))
    read = seen(pool, run.either("p1", "p2"), run.either(0, 2))
    run.ends_in("mv", read)


@blames("kernel", "index_put")
def view_that_differs_of_another_tensor(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    z = run.op("relu", run.leaf("input/1"), wrote="z")
    run.view("slice", z, run.either("0, 0, 2", "0, 2, 4"))
    run.ends_in("index_put", x)


@blames("outside", "linear", opaque_producer=True)
def memory_written_behind_torch_before_a_read_that_was_hashed(run: Run) -> None:
    run.hashed = True
    x = run.op("relu", seen(run.leaf("input/0"), "w"), wrote="r")
    run.ends_in("linear", seen(x, run.either("r", "R")))


@blames("outside", "relu", opaque_producer=True)
def memory_written_behind_torch_after_the_last_op(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.result(x, run.either("y", "Y"))


@blames("outside", "clone", opaque_producer=True)
def copy_of_equal_memory_differs_so_something_wrote_behind_torch(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.ends_in("clone", x)


@blames("kernel", "copy_", opaque_producer=False)
def copy_onto_its_own_source_is_a_race_and_not_a_hidden_write(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.view("slice", x, "0, 1, 3")
    run.ends_in("copy_", into(x, 1), x)


@blames("outside", "relu", opaque_producer=False)
def python_result_that_no_op_returned(run: Run) -> None:
    run.op("relu", run.leaf("input/0"), wrote="r")
    run.python_result(run.either(3, 4))


@blames("kernel", "bincount")
def python_result_that_an_op_returned(run: Run) -> None:
    n = run.differing("bincount", run.leaf("input/0"))
    run.item(n, run.either(3, 4))
    run.python_result(run.either(3, 4))


@blames("outside", "relu", opaque_producer=False)
def result_that_only_one_run_kept(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    if not run.second:
        run.result(x, "r", "extra")
    run.result(x, "r")


# -------------------------------------------------------------------------------------- memory nobody wrote


@blames("kernel", "empty")
def blank_memory_is_read(run: Run) -> None:
    run.ends_in("sum", run.empty())


@blames("kernel", "empty")
def blank_memory_is_returned(run: Run) -> None:
    run.result(run.empty(), run.either("g", "G"))


@blames("kernel", "empty")
def blank_memory_is_changed_in_place(run: Run) -> None:
    run.ends_in("add_", into(run.empty()))


@blames("kernel", "empty")
def blank_memory_filled_in_part_is_read(run: Run) -> None:
    x = run.empty(8)
    run.view("slice", x, "0, 0, 4")
    x = run.op("copy_", into(x), run.leaf("input/0"), wrote=tensor("c", 4))
    run.ends_in("sum", x)


@blames("kernel", "empty")
def blank_memory_filled_in_part_is_returned(run: Run) -> None:
    x = run.empty(8)
    run.view("slice", x, "0, 0, 4")
    x = run.op("copy_", into(x), run.leaf("input/0"), wrote=tensor("c", 4))
    run.result(x, tensor(run.either("g", "G"), 8))


@blames("kernel", "index_put")
def blank_memory_filled_in_two_halves_is_not_blamed(run: Run) -> None:
    x = run.empty(8)
    x = run.op("copy_", into(x), run.leaf("input/0"), wrote=tensor("c", 4))
    x = run.op("copy_", into(x, 4), run.leaf("input/1"), wrote=tensor("d", 4))
    run.ends_in("index_put", x)


@blames("kernel", "empty")
def blank_memory_filled_twice_in_the_same_half(run: Run) -> None:
    x = run.empty(8)
    x = run.op("copy_", into(x), run.leaf("input/0"), wrote=tensor("c", 4))
    x = run.op("copy_", into(x), run.leaf("input/1"), wrote=tensor("d", 4))
    run.ends_in("sum", x)


@blames("kernel", "bmm")
def kernel_that_fills_blank_memory_given_as_out(run: Run) -> None:
    out = Ref("out", run.empty(), 0, True)
    run.ends_in("bmm", run.leaf("input/0"), out)


@blames("kernel", "mylib.attention.default")
def custom_op_that_fills_blank_memory(run: Run) -> None:
    run.ends_in("mylib.attention.default", into(run.empty()), run.leaf("input/0"))


@blames("kernel", "index_put")
def kernel_that_read_equal_memory_filled_in_part(run: Run) -> None:
    run.hashed = True
    x = run.empty(8)
    x = run.op("copy_", into(x, 0, run.either("g", "G")), seen(run.leaf("input/0"), "w"), wrote=tensor("c", 4))
    run.ends_in("index_put", seen(x, "c"))


@blames("kernel", "empty")
def hashed_read_of_memory_filled_in_part(run: Run) -> None:
    run.hashed = True
    x = run.empty(8)
    x = run.op("copy_", into(x, 0, run.either("g", "G")), seen(run.leaf("input/0"), "w"), wrote=tensor("c", 4))
    run.ends_in("sum", seen(x, run.either("cg", "cG")))


@blames("kernel", "put", benign=1)
def garbage_in_an_auxiliary_output_is_not_blamed_where_inputs_were_hashed(run: Run) -> None:
    run.hashed = True
    x = run.op("rnn", seen(run.leaf("input/0"), "w"), wrote=(tensor("out"), tensor(run.either("g", "G"))))
    run.ends_in("put", seen(x, "out"))


@blames("kernel", "bmm")
def kernel_that_fills_blank_memory_whose_garbage_was_hashed(run: Run) -> None:
    run.hashed = True
    out = Ref("out", run.empty(), 0, True, run.either("g", "G"))
    run.ends_in("bmm", seen(run.leaf("input/0"), "w"), out)


@blames("kernel", "index_put")
def hashed_write_beside_a_difference_passes_it_on(run: Run) -> None:
    run.hashed = True
    x = run.op("index_put", seen(run.leaf("input/0"), "w"), wrote=tensor(run.either("a", "A"), 8))
    x = run.op("add_", into(x, 0, "p"), wrote=tensor("q", 4))
    run.ends_in("sum", seen(x, run.either("r", "R")))


# --------------------------------------------------------------------------------------------------- sequence


@blames("sequence", "relu")
def op_only_in_the_second_run_at_the_beginning(run: Run) -> None:
    x = run.leaf("input/0")
    if run.second:
        x = run.op("relu", x, wrote="r")
    run.ends_in("sum", x)


@blames("sequence", "relu", op_index=1)
def op_only_in_the_first_run_in_the_middle(run: Run) -> None:
    x = run.op("neg", run.leaf("input/0"), wrote="n")
    if not run.second:
        x = run.op("relu", x, wrote="r")
    run.ends_in("sum", x)


@blames("sequence", "relu")
def op_only_in_the_second_run_at_the_end(run: Run) -> None:
    x = run.op("neg", run.leaf("input/0"), wrote="n")
    if run.second:
        x = run.op("relu", x, wrote="r")
    run.result(x, run.either("n", "r"))


@blames("sequence", "mul")
def one_run_goes_on_where_the_other_ended(run: Run) -> None:
    x = run.op("neg", run.leaf("input/0"), wrote="n")
    if run.second:
        x = run.op("mul", x, wrote="m")
        x = run.op("sum", x, wrote="s")
        run.result(x, "s")


@blames("sequence", "relu", either_order=False)
def another_op_comes_next(run: Run) -> None:
    run.ends_in(run.either("relu", "gelu"), run.leaf("input/0"))


@blames("sequence", "sub", detail="it reads another tensor than in the first run")
def inputs_of_an_op_are_swapped(run: Run) -> None:
    a, b = run.op("neg", run.leaf("input/0"), wrote="a"), run.op("exp", "input/0", wrote="b")
    run.ends_in("sub", *run.either((a, b), (b, a)))


@blames("sequence", "add_")
def terms_are_added_in_another_order(run: Run) -> None:
    total = run.op("zeros", wrote="0")
    a, b = run.leaf("input/0", "a"), run.leaf("input/1", "b")
    total = run.differing("add_", into(total), run.either(a, b))
    total = run.op("add_", into(total), run.either(b, a), wrote=run.either("ab", "ba"))
    run.result(total, run.either("ab", "ba"))


@blames("sequence", "neg", either_order=False)
def ops_are_reordered(run: Run) -> None:
    x, content = run.leaf("input/0", "x"), "x"
    for name in run.either(("neg", "exp"), ("exp", "neg")):
        content = f"{name}({content})"
        x = run.op(name, x, wrote=content)
    run.result(x, content)


@blames("kernel", "index_put", benign=1)
def harmless_op_inserted_before_the_kernel(run: Run) -> None:
    x = run.leaf("input/0")
    if run.second:
        run.op("mean", x, wrote="m")
    for _ in range(3):
        x = run.op("relu", x, wrote="r")
    run.ends_in("index_put", x)


@blames("kernel", "index_put", benign=1)
def copy_inserted_in_front_of_a_reader_of_the_kernel(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    if run.second:
        x = run.op("clone", x, wrote="r")
    y = run.differing("index_put", "input/0")
    run.ends_in("add", x, y)


@blames("kernel", "index_put")
def alias_inserted_in_front_of_the_kernel(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    if run.second:
        run.view("detach", x)
    run.ends_in("index_put", x)


@blames("sequence", "t")
def view_that_only_one_run_takes(run: Run) -> None:
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    if run.second:
        run.view("t", x)
    run.ends_in("mm", x)


@blames("sequence", "slice")
def view_of_another_tensor(run: Run) -> None:
    a, b = run.op("neg", run.leaf("input/0"), wrote="a"), run.op("exp", "input/0", wrote="b")
    run.view("slice", run.either(a, b), "0, 0, 2")
    run.ends_in("sum", run.either(a, b))


# --------------------------------------------------------------------------------------------------- steering


@blames("sequence", "relu", steered_by=("3", "4", "aten.bincount.default"), either_order=False)
def scalar_steers_which_op_comes_next(run: Run) -> None:
    n = run.differing("bincount", run.leaf("input/0"))
    run.item(n, run.either(3, 4))
    run.ends_in(run.either("relu", "gelu"), run.leaf("input/1"))


@blames("kernel", "bincount", steered_by=None)
def scalar_that_flows_into_an_argument(run: Run) -> None:
    n = run.differing("bincount", run.leaf("input/0"))
    run.item(n, run.either(3, 4))
    run.ends_in("mul", run.leaf("input/1"), arguments=run.either("3", "4"))


@blames("kernel", "bincount")
def scalar_that_flows_into_a_slice(run: Run) -> None:
    n = run.differing("bincount", run.leaf("input/0"))
    run.item(n, run.either(3, 4))
    x = run.op("relu", run.leaf("input/1"), wrote="r")
    run.view("slice", x, run.either("0, 3, 8", "0, 4, 8"))
    run.ends_in("sum", Ref("", x, run.either(3, 4)))


@blames("input", "sum")
def scalar_computed_from_an_input_that_differs_flows_into_an_argument(run: Run) -> None:
    n = run.op("sum", run.leaf("input/0", run.either("x", "X")), wrote=run.either("n", "N"))
    run.item(n, run.either(3.5, 4.5))
    run.ends_in("mul", run.leaf("input/1"), arguments=run.either("3.5", "4.5"))


@blames("outside", "mul", steered_by=("3", "4", "aten.bincount.default"), either_order=False)
def scalar_that_was_computed_with_before_it_became_an_argument(run: Run) -> None:
    n = run.differing("bincount", run.leaf("input/0"))
    run.item(n, run.either(3, 4))
    run.ends_in("mul", run.leaf("input/1"), arguments=run.either("6", "8"))


@blames("sequence", "relu", steered_by=None, either_order=False)
def scalar_that_was_equal_steers_nothing(run: Run) -> None:
    run.item(run.op("sum", run.leaf("input/0"), wrote="n"), 3)
    run.ends_in(run.either("relu", "gelu"), "input/0")


@blames("sequence", "relu", steered_by=None, either_order=False)
def scalar_read_after_the_sequence_differed_steers_nothing(run: Run) -> None:
    y = run.differing(run.either("relu", "gelu"), run.leaf("input/0"))
    n = run.differing("bincount", "input/0")
    run.item(n, run.either(3, 4))
    run.result(y, run.either("r", "g"))


# ------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_table(case: Case) -> None:
    verdict = judge(case.scenario)
    found = verdict.divergence
    assert found is not None, "no divergence was found"
    assert (found.origin, found.kernel) == (case.origin, case.kernel), found
    assert len(verdict.benign) == case.benign, verdict.benign
    for name, expected in case.fields.items():
        actual = _steered_by(verdict) if name == "steered_by" else getattr(found, name)
        assert actual == expected, name


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_does_not_depend_on_which_run_came_first(case: Case) -> None:
    found = judge(case.scenario, swapped=True).divergence
    assert found is not None
    assert found.origin == case.origin, found
    if case.either_order:
        assert found.kernel == case.kernel, found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("second", [False, True], ids=["the first run", "the second run"])
def test_a_run_never_differs_from_itself(case: Case, second: bool) -> None:
    run = Run(second=second)
    case.scenario(run)
    assert find(run.trace(), run.trace()) == Verdict((), None, ())


@pytest.mark.parametrize("empty", [0, 1], ids=["the first is empty", "the second is empty"])
def test_an_empty_trace_is_refused(empty: int) -> None:
    run = Run(second=False)
    run.op("relu", run.leaf("input/0"), wrote="r")
    pair = [run.trace(), run.trace()]
    pair[empty] = Trace(())
    with pytest.raises(HashbenchError, match="empty"):
        find(*pair)


def test_without_results_the_first_record_that_differs_is_blamed() -> None:
    def scenario(run: Run) -> None:
        x = run.op("relu", run.leaf("input/0"), wrote="r")
        y = run.op("index_put", x, wrote=run.either("y", "Y"))
        run.op("sum", y, wrote=run.either("s", "S"))

    found = judge(scenario).divergence
    assert found is not None
    assert (found.origin, found.kernel) == ("kernel", "aten.index_put.default")


def test_equal_results_beside_records_that_differ_are_no_divergence() -> None:
    def scenario(run: Run) -> None:
        x = run.op("rnn", run.leaf("input/0"), wrote=(tensor("r"), tensor(run.either("g", "G"))))
        run.result(x, "r")

    assert judge(scenario) == Verdict((), None, ("forward.0/Net/aten.rnn.default#0",))


def test_the_caller_may_say_which_results_differ() -> None:
    run = Run(second=False)
    x = run.op("relu", run.leaf("input/0"), wrote="r")
    run.result(x, "r")
    found = find(run.trace(), run.trace(), differing=["output"])
    assert found.differing == ("output",)
    assert found.divergence is not None


def test_a_long_chain_of_writes_into_one_tensor_is_judged_in_linear_time() -> None:
    def seconds(writes: int) -> float:
        def scenario(run: Run) -> None:
            x = run.op("index_put", run.leaf("input/0"), wrote=tensor(run.either("a", "A"), 100_000))
            for place in range(writes):
                x = run.op("copy_", into(x, place), "input/0", wrote=tensor("c", 1))
            run.result(run.op("sum", x, wrote=run.either("s", "S")), run.either("s", "S"))

        started = time.process_time()
        found = judge(scenario).divergence
        assert found is not None
        assert found.kernel == "aten.index_put.default"
        return time.process_time() - started

    few, many = (min(seconds(writes) for _ in range(3)) for writes in (2_000, 8_000))
    assert many < 8 * few  # 4 times as long where time is linear, 16 times where it is quadratic, on any machine


def test_the_decision_imports_no_torch() -> None:
    program = "import sys, hashbench.divergence, hashbench.trace.file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def random_program(run: Run, rng: random.Random, *, noisy: int) -> list[str]:
    """A random graph of ops whose contents follow from what they read; in the second run, op ``noisy`` errs.

    Returns the nodes in order. Views, in-place writes, and ops that round differences away occur.
    """
    contents = {run.leaf(f"input/{n}", f"x{n}"): f"x{n}" for n in range(3)}
    nodes: list[str] = []
    alive = list(contents)
    for number in range(25):
        kind = rng.choice(["fresh", "fresh", "in place", "round", "view"])
        read, other = rng.choice(alive), rng.choice(alive)
        error = "!" if run.second and number == noisy else ""
        if kind == "view":
            run.view("detach", read)
            nodes.append("")
            continue
        if kind == "in place" and read.startswith("forward"):
            content = _mixed("add_", contents[read], contents[other]) + error
            node = run.op("add_", into(read), other, wrote=content)
            alive.remove(read)
        elif kind == "round":
            content = _mixed("round", str(number)) + error
            node = run.op("round", read, wrote=content)
        else:
            content = _mixed("mul", contents[read], contents[other]) + error
            node = run.op("mul", read, other, wrote=content)
        contents[node] = content
        alive.append(node)
        nodes.append(node)
    for place, node in enumerate(rng.sample(alive, 3)):
        run.result(node, contents[node], f"output.{place}")
    return nodes


def _mixed(*parts: str) -> str:
    return hashlib.md5("|".join(parts).encode()).hexdigest()[:12]


@pytest.mark.parametrize("seed", range(20))
def test_in_a_random_program_the_op_that_erred_is_blamed_if_and_only_if_a_result_differs(seed: int) -> None:
    blamed = 0
    for noisy in range(25):
        runs = Run(second=False), Run(second=True)
        nodes, _ = (random_program(run, random.Random(seed), noisy=noisy) for run in runs)
        first, second = (run.trace() for run in runs)
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
def test_any_two_random_runs_get_a_verdict_that_does_not_depend_on_their_order(seed: int) -> None:
    runs = Run(second=False), Run(second=False)
    for place, run in enumerate(runs):
        random_program(run, random.Random(seed * 2 + place), noisy=-1)
    first, second = (run.trace() for run in runs)
    there, back = find(first, second), find(second, first)
    assert set(there.differing) == set(back.differing)
    assert there.divergence is not None
    assert back.divergence is not None
