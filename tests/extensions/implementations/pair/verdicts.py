"""Verdicts on two implementations, written by hand: one of every outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hashbench.extensions.implementations.pair.verdict import (
    ComparedResult,
    ImplementationsVerdict,
    OpPlace,
    PairOutcome,
    PartedPlace,
)
from hashbench.extensions.implementations.verdict import WeightsDifference, WeightsMatch, WeightsVerdict

FUSED = WeightsMatch(kind="fused", a=("layers.0.attn.q.weight", "layers.0.attn.k.weight"), b=("blocks.0.qk",))
SAME = WeightsVerdict(a=2, b=1, matches=(FUSED,), differences=())
STALE = WeightsDifference(
    kind="changed",
    a=("layers.1.norm.weight",),
    b=("blocks.1.scale",),
    differing=1,
    total=64,
    first_a=(7,),
    first_b=(7,),
    value_a="1.0",
    value_b="1.5",
)

MM = OpPlace(
    "aten.mm.default",
    "layers.0.attn",
    "model.py:21 q = self.q(x)",
    output="bfloat16[22, 64]",
    ops=("aten.mm.default",),
    ids=("a2",),
)
ADDMM = OpPlace(
    "aten.addmm.default", "blocks.0", "engine.py:9 y = fused(x)", output="bfloat16[2, 11, 192]", ids=("b3",)
)
ADD = OpPlace(
    "aten.add.Tensor",
    "layers.1.norm",
    "model.py:33 x = x * torch.rsqrt(variance + self.eps)",
    output="float32[2, 11, 1]",
    scalars="1e-05",
    ids=("a5",),
)
ADD_B = OpPlace("aten.add.Tensor", "", "engine.py:41 v = v + 1e-6", output="float32[22]", scalars="1e-06", ids=("b5",))

EPS = PartedPlace(
    ADD,
    ADD_B,
    inputs=(("aten.mean.dim in layers.1.norm", "aten.mean.dim"),),
    constants=(("scalar", "1e-05", "1e-06"),),
    values=(("[0, 0, 0]", 0.25001, 0.250001), ("[0, 1, 0]", 0.5, float("nan"))),
    units=604.0,
    share=1.0,
)
LONE = PartedPlace(
    OpPlace("aten.tanh.default", "head", "model.py:50 return torch.tanh(x)", phase="backward", ids=("a6",)),
    None,
    constants=(("constant", "", "weight float64[3, 3]"),),
    note="the smaller of two equal values was chosen",
)
SDPA = PartedPlace(
    OpPlace("aten._scaled_dot_product_flash_attention_for_cpu.default", "attn", "a.py:3 sdpa(q, k, v)", ids=("a3",)),
    OpPlace(
        "aten.bmm.default",
        source="b.py:7 q @ k.mT",
        ops=("aten.bmm.default", "aten.mul.Tensor", "aten._softmax.default", "aten.bmm.default"),
        ids=("b3", "b4"),
    ),
    inputs=(("q", "q"), ("aten.view.default in attn", "k")),
    units=123456.0,
    share=0.0004,
)

COLUMNS = (
    tuple((f"a{number}", f"aten.op{number}.default in layers.{number // 4}") for number in range(8)),
    tuple((f"b{number}", f"aten.op{number}.default") for number in range(7)),
)
JOINED = tuple((f"a{number}", f"b{number}") for number in range(5))

VERDICTS: Mapping[str, ImplementationsVerdict] = {
    "equal": ImplementationsVerdict(
        PairOutcome.EQUAL, results=(ComparedResult("output", 0.0),), weights=SAME, aligned=(7, 7), dtype="float32"
    ),
    "rounding": ImplementationsVerdict(
        PairOutcome.ROUNDING,
        parted=(PartedPlace(MM, ADDMM, inputs=(("x", "x"),), values=(("0", 1.0, 1.0078125),), units=2.0, share=0.31),),
        results=(ComparedResult("output.logits", 40.0, 0.0123), ComparedResult("output.cache", 0.0)),
        weights=SAME,
        aligned=(512, 520),
        dtype="bfloat16",
        columns=COLUMNS,
        joined=JOINED,
        seconds={"record": 1.5},
    ),
    "rounding of a gradient": ImplementationsVerdict(
        PairOutcome.ROUNDING,
        parted=(PartedPlace(replace(MM, phase="backward"), replace(ADDMM, phase="backward")),),
        results=(ComparedResult("output", 0.0), ComparedResult("loss", 0.0)),
        weights=SAME,
        dtype="float32",
    ),
    "rounding that no op explains": ImplementationsVerdict(
        PairOutcome.ROUNDING,
        results=(ComparedResult("output", 0.5),),
        weights_reason="one side has none",
        dtype="float32",
    ),
    "a mistake": ImplementationsVerdict(
        PairOutcome.MISTAKE,
        parted=(EPS,),
        results=(ComparedResult("output", 40000.0, 0.2), ComparedResult("gradient of x", None)),
        weights=SAME,
        aligned=(310, 512),
        dtype="float32",
        columns=COLUMNS,
        joined=JOINED,
    ),
    "several mistakes": ImplementationsVerdict(
        PairOutcome.MISTAKE,
        parted=(SDPA, EPS, *[LONE] * 6),
        weights=WeightsVerdict(a=4, b=2, matches=(FUSED,), differences=(STALE, STALE)),
        aligned=(1, 2),
        fallbacks={"aten._grouped_mm.default": 4, "mine.op.default": 1},
        dtype="float32",
    ),
    "one side alone": ImplementationsVerdict(PairOutcome.MISTAKE, parted=(LONE,), weights=SAME, dtype="float32"),
    "a mistake at no op": ImplementationsVerdict(PairOutcome.MISTAKE, results=(ComparedResult("output", 1e12),)),
    "not known": ImplementationsVerdict(
        PairOutcome.NOT_KNOWN,
        reason="(b) raised ValueError: no kernel",
        weights_reason="(b) holds no tensors",
        parted=(),
        aligned=(0, 0),
    ),
    "weights that nothing reads": ImplementationsVerdict(
        PairOutcome.EQUAL,
        results=(ComparedResult("output", 0.0),),
        weights=WeightsVerdict(a=2, b=1, matches=(FUSED,), differences=(STALE,)),
        dtype="float32",
    ),
}
