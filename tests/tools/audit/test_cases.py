"""One case measured under the three settings of the flag, on small calls made for the purpose."""

from __future__ import annotations

import itertools
import os

import address_ops
import pytest
import torch

from hashbench.core.check.function import FunctionCall, fresh_copy
from hashbench.core.diagnose.repro.torch_docs import look_up
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Budget
from hashbench.core.run.settings import settings
from hashbench.tools.audit import cases
from hashbench.tools.audit.audit_table import AuditOptions
from hashbench.tools.audit.cases import (
    Case,
    Measurement,
    StressLine,
    at_offset,
    built,
    cases_of,
    described,
    fingerprint,
    follows_poison,
    measure,
    stress_lines,
)
from hashbench.tools.audit.rows import joined, rows_of, rows_of_case


def case(function, *args, backward: bool = False, moved: bool = False, **kwargs) -> Case:
    call = FunctionCall(function, args, kwargs)
    return Case("op_db", "an_op", "float32", "0", described(call), call, backward, moved)


def words(measurement: Measurement, phase: str = "forward") -> tuple[str, ...]:
    return tuple(measurement.passes[name][phase].measured for name in ("off", "on", "unfilled"))


def measured(one: Case, runs: int = 4) -> Measurement:
    return measure([one], runs=runs, seed=1)[0]


def rows(one: Case, *, budget: float = 0.0):
    return list(rows_of_case(measured(one), AuditOptions(runs=4, budget=budget), Budget(budget)))


def counting(modulus: int):
    """A function that adds another number in every run, of ``modulus`` in turn."""
    numbers = itertools.count()
    return lambda x: x + next(numbers) % modulus


@pytest.mark.slow
def test_outcomes_are_counted_and_every_run_starts_from_the_same_random_state_and_settings() -> None:
    before = settings()
    seeded = measured(case(torch.nn.functional.dropout, torch.ones(50), 0.5))
    differing = measured(case(counting(3), torch.zeros(2)), runs=7)

    assert (words(seeded), seeded.passes["off"]["forward"].distinct) == (("identical",) * 3, 1)
    assert (words(differing), differing.passes["off"]["forward"].distinct) == (("differs",) * 3, 3)
    assert settings() == before


@pytest.mark.slow
def test_what_a_call_leaves_in_its_arguments_counts_and_reaches_no_other_run() -> None:
    def writes(x: torch.Tensor) -> int:
        x += torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.int32)
        return 0

    found = measured(case(writes, torch.zeros(1, dtype=torch.int32)))

    assert words(found) == ("differs",) * 3
    assert words(measured(case(torch.Tensor.add_, torch.zeros(3), 1))) == ("identical",) * 3


def test_gradients_are_a_pass_of_their_own() -> None:
    numbers = itertools.count()

    class Drifting(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, gradient):
            return gradient + next(numbers)

    found = measured(case(Drifting.apply, torch.ones(3, requires_grad=True), backward=True))

    assert words(found) == ("identical",) * 3
    assert words(found, "backward") == ("differs",) * 3


def test_memory_that_nobody_wrote_is_found_although_runs_agree() -> None:
    wanted = torch.rand(40, 20, 1, 2, 2, dtype=torch.float64)  # pytorch#176254

    found = measured(case(torch.nn.functional.pad, wanted, [2, 0, -1, 2, 0, 0], "circular"))

    assert found.passes["on"]["forward"].measured == "identical"  # filled
    assert found.passes["off"]["forward"].measured in ("follows memory", "differs")
    assert follows_poison({1: {5}, 2: {6}})
    assert not follows_poison({1: {5}, 2: {5}})
    assert not follows_poison({1: {5, 7}, 2: {6}})
    assert not follows_poison({})


ROWS = {
    "refused under the flag": (
        case(torch.Tensor.put, torch.zeros(9), torch.zeros(4, dtype=torch.int64), torch.ones(4)),
        {"off": "identical", "on": "raises", "unfilled": "raises", "verdict": "as documented", "off_distinct": 1,
         "on_distinct": None, "documented": "raises under the flag: torch.Tensor.put_ when accumulate=False",
         "error": "does not have a deterministic implementation"}),
    "raises without the flag": (
        case(torch.mm, torch.ones(2, 3), torch.ones(2, 3)),
        {"verdict": "fails", "off": "raises", "off_distinct": None, "error": "cannot be multiplied"}),
    "a result of an unknown kind": (
        case(lambda _: object(), torch.ones(2)), {"verdict": "not comparable", "error": "builtins.object"}),
    "nothing to differentiate": (
        case(torch.argmax, torch.ones(3, requires_grad=True), backward=True), {"phase": "forward"}),
    "unwritten memory that is handed out": (
        case(torch.empty, [5000]),
        {"verdict": "as documented", "documented": "memory that nobody wrote; filled under the flag",
         "on": "identical"}),
    "no budget for a cause": (
        case(counting(100), torch.zeros(2)),
        {"kernel": "", "cause": "", "because": "the cause was not looked for: no time left for this op"}),
}  # fmt: skip


@pytest.mark.parametrize(("one", "expected"), ROWS.values(), ids=ROWS)
def test_the_one_row_of_a_case(one: Case, expected: dict[str, object]) -> None:
    [row] = rows(one)

    for column, value in expected.items():
        found = getattr(row, column)
        assert value in found if column in ("documented", "error") else found == value, column


def test_a_backward_pass_whose_forward_is_refused_has_its_documentation() -> None:
    unpool = case(
        torch.nn.functional.max_unpool2d,
        torch.rand(1, 1, 4, 4, requires_grad=True),
        torch.zeros(1, 1, 4, 4, dtype=torch.int64),
        2,
        backward=True,
    )

    assert [(row.phase, row.on, row.verdict) for row in rows(unpool)] == [
        ("forward", "raises", "as documented"),
        ("backward", "raises", "as documented"),
    ]


# -------------------------------------------------------------------------------------------------- causes


_DIRECTIONS = itertools.cycle((1, -1))


@torch.library.custom_op("audit_test::add_rows_", mutates_args=("x",))
def add_rows_(x: torch.Tensor, other: torch.Tensor) -> None:
    """Adds row by row, at each call from the other end, as threads may; that matters where they share memory. Without
    torch, so that no tracer sees inside."""
    rows, added = x.numpy(), other.numpy()
    for row in range(len(x))[:: next(_DIRECTIONS)]:
        rows[row] += added[row]


@pytest.mark.slow
def test_the_kernel_that_differed_first_is_named_with_its_cause() -> None:
    x = torch.randn(9, 9, generator=torch.Generator().manual_seed(3))

    [row] = rows(case(lambda x: add_rows_(x, x.t()), x), budget=20.0)

    assert (row.off, row.on, row.verdict) == ("differs", "differs", "differs under the flag")
    assert (row.kernel, row.cause) == ("audit_test.add_rows_.default", "overlapping_views")


def test_moved_memory_is_blamed_on_the_kernel_that_looks_at_addresses() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(3))

    [row] = rows(case(address_ops.total, x, moved=True), budget=20.0)

    assert (row.kernel, row.cause, row.verdict) == ("addressed.total.default", "alignment", "differs under the flag")


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        ([], "not listed"),
        (["aten.add.Tensor", "aten.bmm.default"], "not listed for cpu"),
        (["aten.bmm.default", "aten.max_unpool2d.default"], "raises under the flag: torch.nn.MaxUnpool2d"),
        (["aten.max_unpool2d.default"] * 2, "raises under the flag: torch.nn.MaxUnpool2d"),
    ],
)
def test_what_is_listed_for_this_device_goes_before_what_is_for_others(ops: list[str], text: str) -> None:
    assert joined([look_up(op, device="cpu") for op in ops]) == text


# ------------------------------------------------------------------------------------------------- our own inputs


def stress_line(call: str, arguments: str) -> StressLine:
    return StressLine("op", "sample", call, arguments, "float32", "")


@pytest.mark.slow
def test_every_stress_input_can_be_made_and_twice_alike() -> None:
    lines = stress_lines()

    assert {("kthvalue", "ties"), ("bmm", "sparse by dense")} <= {(line.op, line.sample) for line in lines}
    assert len({(line.op, line.sample) for line in lines}) == len(lines)
    assert {line.options for line in lines} == {"", "backward", "moved"}
    for line in lines:
        for dtype in line.dtypes.split():
            made = [built(line, dtype=getattr(torch, dtype), device="cpu", seed=4) for _ in range(2)]
            assert described(made[0]) == described(made[1]), line
            first, second = (fingerprint(list(call.args)) for call in made)
            assert first == second or line.call == "empty", line


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("no_such_function", "1"),
        *(("sum", text) for text in ("__import__('os')", "open('x')", "normal(2).data", "_tensor(1)", "__init__(1)")),
        *(("sum", text) for text in ("x", "[i for i in [1]]", "normal(2", "normal('a')")),
    ],
)
def test_only_builders_are_called(call: str, arguments: str) -> None:
    with pytest.raises(HashbenchError, match="cannot build"):
        built(stress_line(call, arguments), dtype=torch.float32, device="cpu", seed=1)


def test_overlapping_views_share_memory_in_every_run_and_moved_inputs_lie_elsewhere_with_the_same_content() -> None:
    line = next(line for line in stress_lines() if line.sample == "adds its own transpose")
    call = built(line, dtype=torch.float32, device="cpu", seed=1)
    copied = fresh_copy(call)
    assert copied.args[0].data_ptr() == copied.args[1].data_ptr() != call.args[0].data_ptr()

    call = FunctionCall(torch.dot, (torch.arange(9.0), torch.ones(9)))
    assert {at_offset(call, run).args[0].data_ptr() % 64 // 4 for run in range(8)} == set(cases.SHIFTS)
    assert torch.equal(at_offset(call, 5).args[0], call.args[0])


def test_inputs_that_cannot_be_made_are_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "stress_lines", lambda: (stress_line("sum", "nothing()"),))

    [row] = rows_of("stress", "op", AuditOptions(dtypes=("float32", "int64")))

    assert (row.verdict, row.dtype, row.off) == ("fails", "float32", "not run")
    assert "cannot make its inputs" in row.error


def test_only_dtypes_that_were_asked_for_are_run() -> None:
    found = list(cases_of("stress", "kthvalue", AuditOptions(dtypes=("int64", "bfloat16"))))

    assert [(dtype, [one.sample for one in made]) for dtype, made in found] == [("int64", ["ties"])]
