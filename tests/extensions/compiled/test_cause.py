"""Why a compiled model is inaccurate: what is made of ladders, passes, judgements and trials, written by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.inductor.nodes import NodeFacts
from hashbench.core.processes import Budget
from hashbench.core.records import ExperimentResult
from hashbench.extensions.compiled import cause as compiled_cause
from hashbench.extensions.compiled import fallbacks
from hashbench.extensions.compiled.cause import MISTAKE, Blamed, CompiledCase, rungs_below
from hashbench.extensions.compiled.dynamo_graphs import StaleNode
from hashbench.extensions.compiled.judge import JudgedBuffer, KernelJudgement
from hashbench.extensions.compiled.ladder import BACKENDS, Ladder, Rung, Semantic
from hashbench.extensions.compiled.memory import LostInput
from hashbench.extensions.compiled.names import Overwriter
from hashbench.extensions.compiled.passes import Change
from tests.extensions.compiled.steps import InFloat32, made, step_of

FACTS = NodeFacts("aten.gelu.default", "Net.act", "net.py:7 gelu(x)")
PLACE = (FACTS.op, FACTS.module, FACTS.source)


@pytest.mark.parametrize(
    ("backend", "rungs"),
    [
        ("eager", ("eager",)),
        ("aot_eager", ("eager", "aot_eager")),
        ("aot_eager_decomp_partition", BACKENDS),
        ("inductor", (*BACKENDS, "inductor")),
        ("mine", (*BACKENDS, "mine")),
    ],
)
def test_backends_of_the_ladder(backend: str, rungs: tuple[str, ...]) -> None:
    assert rungs_below(backend) == rungs


def buffer(kernel: str, ratio: float, op: str = "aten.gelu.default", **more: Any) -> JudgedBuffer:
    return JudgedBuffer(f"id of {kernel}", kernel, "buf0", op, "Net.act", "net.py:7", "forward", ratio, **more)


def judgement(*buffers: JudgedBuffer, lost: tuple[LostInput, ...] = ()) -> KernelJudgement:
    return KernelJudgement(buffers, lost=lost)


FAR, NEAR = MISTAKE * 2, MISTAKE / 2
OWN: dict[str, tuple[KernelJudgement | None, KernelJudgement | None, str]] = {
    "not judged": (None, None, ""),
    "rounding": (judgement(buffer("a", NEAR)), None, ""),
    "far, and float64 was not judged": (judgement(buffer("a", NEAR), buffer("b", FAR)), None, "b"),
    "the first of two": (judgement(buffer("a", FAR), buffer("b", FAR * 9)), None, "a"),
    "right in float64": (judgement(buffer("a", FAR)), judgement(buffer("a", 1.0)), ""),
    "wrong in float64": (judgement(buffer("a", FAR)), judgement(buffer("a", 99.0)), "a"),
    "another op right in float64": (judgement(buffer("a", FAR)), judgement(buffer("a", 1.0, "aten.tanh.default")), "a"),
    "reads what was lost": (judgement(buffer("a", FAR, lost=True)), None, ""),
}


@pytest.mark.parametrize("case", OWN)
def test_a_kernel_that_is_wrong_in_the_own_dtype(case: str) -> None:
    own, wide, expected = OWN[case]
    found = compiled_cause._wrong_in_own_dtype(own, wide)
    assert ("" if found is None else found.kernel) == expected


@pytest.mark.parametrize(
    ("rungs", "text"),
    [
        ((), ""),
        ((Rung("eager", 0.0), Rung("aot_eager", 3.0, "output.0")), "output.0 differs with backend aot_eager"),
        ((Rung("inductor", raised="ValueError: no"),), "inductor raises: ValueError: no"),
    ],
)
def test_a_ladder_in_words(rungs: tuple[Rung, ...], text: str) -> None:
    assert compiled_cause._of(Ladder(rungs)) == text


def changes(*words: str) -> Any:
    """``"removed:aten.mul"``: the changes of a pass."""
    nodes = [
        SimpleNamespace(change=Change(kind), facts=NodeFacts(op)) for kind, _, op in (w.partition(":") for w in words)
    ]
    return SimpleNamespace(nodes=nodes)


@pytest.mark.parametrize(
    ("words", "op"),
    [
        ((), ""),
        (("made:aten.a", "removed:aten.b", "removed:aten.c", "changed:aten.d"), "aten.c"),
        (("made:aten.a", "changed:aten.d"), "aten.d"),
        (("made:aten.a", "reads what was made:aten.d"), "aten.a"),
        (("made:aten.a", "made:"), "aten.a"),
    ],
)
def test_op_of_a_wrong_pass(words: tuple[str, ...], op: str) -> None:
    found = compiled_cause._of_pass(changes(*words))
    assert ("" if found is None else found.op) == op


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("made:aten.neg", "reads what was made:aten.d"), ": what it inserts is read by aten.d"),
        (("made:aten.neg", "reads what was made:aten.d", "removed:aten.b"), ""),
        (("made:aten.neg", "changed:aten.d"), ""),
    ],
)
def test_what_a_pass_only_inserts_is_told_with_its_reader(words: tuple[str, ...], text: str) -> None:
    assert compiled_cause._inserted(changes(*words)) == text


# ------------------------------------------------------------------------------------------------------- findings


class Runs:
    """Looks into a program that finds what it is told to."""

    def __init__(self, look: Any = None, own: Any = None, *, gone: Callable[[], bool] = lambda: False) -> None:
        self.look, self._own, self._gone = look, own, gone

    def own(self) -> Any:
        return self._own

    def is_gone(self, _: Blamed) -> bool:
        return self._gone()


def looking(
    judged: KernelJudgement | None = None,
    *,
    wrong: Any = None,
    stage: str = "lowering",
    overwriter: Overwriter | None = None,
) -> Any:
    return SimpleNamespace(
        graphs={"t.py": None},
        judgement=judged,
        wrong_pass=lambda: wrong,
        split=lambda _: SimpleNamespace(stage=stage, ops=(FACTS, MUL)),
        overwriter_of=lambda _: overwriter,
        amplified=lambda: [SimpleNamespace(facts=FACTS, factor=123.4, error=5678.9)],
        blamed=lambda _: None,
    )


def case_of(
    own: KernelJudgement | None = None, *, seconds: float = 60.0, repro: tuple[Path, str] | None = None
) -> CompiledCase:
    return CompiledCase(
        SimpleNamespace(),
        "inductor",
        lambda _: (),
        ("output.0",),
        own,
        Budget(seconds),
        repro,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _custom_ops_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_cause, "undeclared_effects", lambda _: SimpleNamespace(wrong=()))
    monkeypatch.setattr(compiled_cause, "wrong_fakes", lambda _: SimpleNamespace(wrong=()))


def found(stage: str, runs: Runs, own: KernelJudgement | None = None, **ladder: Any) -> Blamed:
    return compiled_cause._found(
        case_of(own),
        runs,  # type: ignore[arg-type]
        Ladder((Rung("inductor", 3.0, "output.0"),), stage, **{"semantic": Semantic.YES, **ladder}),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "gone"), [(1 + 2**-24, True), (1.01, False)], ids=["rounding", "a mistake"])
def test_a_mistake_is_gone_where_a_cast_to_float32_leaves_its_rounding(factor: float, *, gone: bool) -> None:
    step = step_of(made(InFloat32), [torch.randn(64, 8)], training=False)

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        if backend != "inductor":
            return step(backend, dtype)
        return {name: value * factor for name, value in step(None, dtype).items()}

    with contextlib.ExitStack() as stack:
        runs = compiled_cause._LadderRuns(replace(case_of(), model=SimpleNamespace(step=run)), stack)  # type: ignore[arg-type]
        runs.look = looking()
        assert runs.is_gone(Blamed.at("codegen", semantic="yes")) is gone


def test_nothing_but_rounding_says_where_it_grew() -> None:
    blamed = found("", Runs(own=looking()), semantic=Semantic.NO)
    assert (blamed.facts.stage, blamed.facts.op, blamed.facts.semantic) == ("rounding", FACTS.op, "no")
    assert blamed.finding.detail == "rounding, amplified by aten.gelu.default in Net.act x123 (to 5.68e+03 ulp)"
    unknown = found("", Runs(), semantic=Semantic.UNKNOWN, reason="it raises in float64")
    assert (unknown.facts.stage, unknown.finding.detail) == ("", "rounding; it raises in float64")


def test_without_float64_nothing_is_called_rounding() -> None:
    rung = Rung("inductor", 3.0, "output.0")
    blamed = compiled_cause._found(case_of(), Runs(), Ladder((rung,), reason="it raises", dtype=None))  # type: ignore[arg-type]
    assert (blamed.facts.stage, blamed.facts.op, blamed.facts.semantic) == ("", "", "unknown")
    detail = "in the model's own dtype, no backend differs by more than rounding explains; it raises"
    assert blamed.finding.detail == detail
    blamed = compiled_cause._found(case_of(), Runs(), Ladder((), reason="it raises", dtype=None))  # type: ignore[arg-type]
    assert blamed.finding.detail == "mistake or rounding is not known: it raises"


def test_what_was_compared_in_the_own_dtype_is_told_so() -> None:
    how = {"dtype": None, "semantic": Semantic.UNKNOWN, "reason": "it raises"}
    blamed = found("inductor", Runs(own=looking(judgement(buffer("k", FAR)), wrong=WRONG_PASS)), **how)
    assert (blamed.facts.stage, blamed.facts.op, blamed.facts.semantic) == (
        "joint_graph_passes",
        "aten.mul.Tensor",
        "unknown",
    )
    assert blamed.finding.detail.endswith("; compared in the model's own dtype; it raises")
    blamed = found("inductor", Runs(own=looking(judgement(buffer("a", NEAR), buffer("k", FAR)))), **how)
    assert (blamed.facts.stage, blamed.finding.kernel) == ("lowering", "k")


def test_a_kernel_that_float64_did_not_judge_is_blamed_by_its_own_dtype() -> None:
    blamed = found("", Runs(own=looking()), judgement(buffer("k", FAR)), semantic=Semantic.UNKNOWN, reason="no")
    assert (blamed.facts.stage, blamed.finding.kernel, blamed.facts.semantic) == ("lowering", "k", "unknown")
    assert blamed.finding.detail.endswith("; not judged in float64: no")


def test_dynamo_names_the_first_stale_node(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = StaleNode(1, "mul", FACTS, ("factor",))
    for first, op, detail in (
        (stale, FACTS.op, str(stale)),
        (None, "", "output.0 differs with backend inductor"),
    ):
        monkeypatch.setattr(compiled_cause, "first_stale", lambda _, first=first, **__: first)
        blamed = found("dynamo", Runs())
        assert (blamed.facts.stage, blamed.facts.op, blamed.finding.detail, blamed.finding.kernel) == (
            "dynamo",
            op,
            detail,
            "",
        )


def test_a_wrong_decomposition_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(op="aten.elu.default", relative=0.0123, backward=True, facts=FACTS)
    for ops, op, phase in (((wrong,), "aten.elu.default", "backward"), ((), "", "")):
        checked = SimpleNamespace(wrong=ops)
        monkeypatch.setattr(compiled_cause, "check_decompositions", lambda _, found=checked, **__: found)
        blamed = found("decomposition", Runs())
        assert (blamed.facts.stage, blamed.facts.op, blamed.finding.phase) == ("decomposition", op, phase)


def test_a_custom_op_that_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    effect = SimpleNamespace(
        argument="x", effect=SimpleNamespace(value="written"), backward=False, facts=FACTS, op="zoo.bump.default"
    )
    fake = SimpleNamespace(
        custom=True, what="stride", fake="(1, 2)", real="(2, 1)", backward=True, facts=FACTS, op="zoo.turn.default"
    )
    assert compiled_cause.undeclared(None) == Blamed.at("aot_autograd")
    torchs = SimpleNamespace(**{**vars(fake), "custom": False})
    monkeypatch.setattr(compiled_cause, "wrong_fakes", lambda _: SimpleNamespace(wrong=(torchs, fake)))
    blamed = compiled_cause.undeclared(None)
    assert (blamed.facts.op, blamed.finding.phase, blamed.finding.module) == (
        "zoo.turn.default",
        "backward",
        "Net.act",
    )
    assert blamed.finding.detail == "fake implementation returns stride (1, 2), real kernel (2, 1)"
    inside = found("inductor", Runs(looking(judgement(buffer("k", FAR)))))
    assert (inside.facts.stage, inside.facts.op, inside.finding.kernel) == ("aot_autograd", "zoo.turn.default", "")
    monkeypatch.setattr(compiled_cause, "undeclared_effects", lambda _: SimpleNamespace(wrong=(effect,)))
    blamed = compiled_cause.undeclared(None)
    assert (blamed.facts.op, blamed.finding.phase) == ("zoo.bump.default", "forward")
    assert blamed.finding.detail == "x: written, not declared in its schema"


LOST = LostInput("sum", "buf0", "exp", "sin", "id of sin")
WRONG_PASS = SimpleNamespace(
    **vars(changes("removed:aten.mul.Tensor")),
    **{"name": "fold", "subsystem": "joint_graph_passes", "result": "mul", "relative": 0.5},
)
INSIDE: dict[str, tuple[Any, KernelJudgement | None, tuple[str, str, str]]] = {
    "graphs were not seen": (None, None, ("inductor", "", "")),
    "a pass": (
        looking(judgement(buffer("k", FAR)), wrong=WRONG_PASS),
        None,
        ("joint_graph_passes", "", "aten.mul.Tensor"),
    ),
    "memory": (looking(judgement(buffer("sum", FAR), lost=(LOST,))), None, ("memory_planning", "sin", "")),
    "memory, told with its op": (
        looking(judgement(replace(buffer("sin", 1.0), node="id of sin"), lost=(LOST,))),
        None,
        ("memory_planning", "sin", "aten.gelu.default"),
    ),
    "a kernel": (looking(judgement(buffer("k", 99.0))), None, ("lowering", "k", "aten.gelu.default")),
    "a kernel whose stage is not told": (
        looking(judgement(buffer("k", 99.0)), stage=""),
        None,
        ("codegen", "k", "aten.gelu.default"),
    ),
    "no kernel": (looking(judgement(buffer("k", 1.0))), judgement(buffer("k", NEAR)), ("inductor", "", "")),
    "only in the own dtype": (
        looking(judgement(buffer("k", 1.0))),
        judgement(buffer("k", FAR)),
        ("codegen", "k", "aten.gelu.default"),
    ),
    "the run in float64 failed": (looking(None), judgement(buffer("k", FAR)), ("codegen", "k", "aten.gelu.default")),
}


@pytest.mark.parametrize("case", INSIDE)
def test_what_is_wrong_inside_inductor(case: str) -> None:
    look, own, expected = INSIDE[case]
    blamed = found("inductor", Runs(look), own)
    assert (blamed.facts.stage, blamed.finding.kernel, blamed.facts.op) == expected
    assert blamed.facts.semantic == "yes"


def test_ratios_are_those_of_the_own_dtype() -> None:
    blamed = found("inductor", Runs(looking(judgement(buffer("k", 1e15)))), judgement(buffer("k", 7.0, own_ratio=0.5)))
    assert (blamed.facts.beyond_rounding, blamed.facts.eager_rounding) == (7.0, 0.5)
    assert blamed.finding.detail.endswith(", in float64 1e+15 times beyond rounding")


# ------------------------------------------------------------------------------------------------------ experiments


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes in force, the last one last; nothing of torch is changed."""
    now: list[str] = []

    @contextlib.contextmanager
    def apply(change: fallbacks.CompilerChange, **of: str) -> Iterator[None]:
        if "unknown" in of["op"]:
            raise HashbenchError("torch has no op", consequence="it cannot run eagerly")
        now.append(f"{change.name} {of['op']}".strip())
        yield

    monkeypatch.setattr(fallbacks, "applied", apply)
    return now


MUL = NodeFacts("aten.mul.Tensor", "Net.scale", "net.py:9 x * y")
KERNEL = Blamed.at("codegen", kernel="k", op="aten.gelu.default", ops=(MUL,), node="id of k")
OVERWRITER = Overwriter("sin", "id of sin", "buf0", "exp", NodeFacts("aten.sin.default", "Net"))


def proven(
    gone: str, applied: list[str], blamed: Blamed = KERNEL, *, seconds: float = 60.0, look: Any = None
) -> Blamed:
    runs = Runs(look, gone=lambda: applied[-1].startswith(gone))
    return compiled_cause._proven(case_of(seconds=seconds), runs, blamed)  # type: ignore[arg-type]


def names(trials: tuple[ExperimentResult, ...]) -> list[str]:
    return [f"{one.name} {one.found}".strip() for one in trials]


def test_changes_are_tried_until_one_helps(applied: list[str]) -> None:
    blamed = proven("eager_op aten.mul", applied)
    assert (blamed.finding.confidence, blamed.facts.op) == ("proven", "aten.mul.Tensor")
    assert (blamed.finding.module, blamed.finding.source) == (MUL.module, MUL.source)  # not those of its neighbour
    assert blamed.facts.cured_by == "aten.mul.Tensor runs eagerly"
    assert names(blamed.finding.evidence.results)[-1] == "eager_op aten.mul.Tensor"
    assert len(applied) == len(blamed.finding.evidence.results)


@pytest.mark.parametrize(
    ("helps", "op", "candidates"),
    [
        ({"scalar_code", "eager_op aten.mul"}, "aten.mul.Tensor", ()),
        ({"scalar_code"}, "aten.gelu.default", ("aten.gelu.default", "aten.mul.Tensor")),
    ],
)
def test_an_op_of_a_fused_kernel_is_looked_for(
    helps: set[str], op: str, candidates: tuple[str, ...], applied: list[str]
) -> None:
    runs = Runs(None, gone=lambda: any(applied[-1].startswith(one) for one in helps))
    blamed = compiled_cause._proven(case_of(), runs, KERNEL)  # type: ignore[arg-type]
    assert (blamed.facts.op, blamed.candidates, blamed.finding.confidence) == (op, candidates, "proven")
    assert blamed.facts.cured_by == "code is not vectorized (cpp.simdlen=1)"
    assert blamed.finding.module == ("Net.scale" if op == MUL.op else "")


def test_without_a_cure_the_stage_is_open(applied: list[str]) -> None:
    blamed = proven("never", applied)
    assert (blamed.finding.confidence, blamed.facts.cured_by, blamed.facts.op) == ("open", "", "aten.gelu.default")


def test_without_time_nothing_is_tried(applied: list[str]) -> None:
    blamed = proven("eager_op", applied, seconds=0.0)
    assert (applied, blamed.finding.confidence) == ([], "open")
    assert [one.ran for one in blamed.finding.evidence.results] == [False]


def test_a_change_that_cannot_be_made_is_noted(applied: list[str]) -> None:
    blamed = proven("eager_op aten.mul", applied, KERNEL.having(op="zoo.unknown.default"))
    noted = [one for one in blamed.finding.evidence.results if one.note]
    assert [(one.ran, "torch has no op" in one.note) for one in noted] == [(False, True)] * len(noted)


def test_a_cure_of_memory_names_who_wrote_over_it(applied: list[str]) -> None:
    blamed = proven("no_buffer_reuse", applied, look=looking(overwriter=OVERWRITER))
    assert (blamed.facts.stage, blamed.finding.kernel, blamed.facts.op) == (
        "memory_planning",
        "sin",
        "aten.sin.default",
    )
    assert blamed.finding.detail == "sin writes over buf0 of exp before k reads it"
    unknown = proven("no_buffer_reuse", applied, look=looking())
    assert (unknown.facts.stage, unknown.finding.kernel) == ("memory_planning", "k")


@pytest.mark.parametrize("blamed", [KERNEL, KERNEL.having(buffer="buf0", stage="dynamo")])
def test_only_kernels_have_a_repro(blamed: Blamed, tmp_path: Path) -> None:
    case = case_of(repro=(tmp_path, "in net"))
    assert compiled_cause._reproduced(case, Runs(own=looking()), blamed) == ("", "")  # type: ignore[arg-type]
    assert torch.is_grad_enabled()
