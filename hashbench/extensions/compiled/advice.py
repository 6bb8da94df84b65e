"""What to do about a stage of the compiler that computes something else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OF_TORCH = (
    "report it: no custom op is to blame, AOTAutograd itself changes what the program computes; until then: take what "
    "updates or views an input or a buffer out of the compiled part, or compile with backend='eager'"
)
"""What to do where AOTAutograd is wrong, and no custom op promised anything."""

LEFT_OUT = "left out"
"""What codegen did of which the generated kernel leaves a part of its result as the memory was."""

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "dynamo": "look at what dynamo traced (TORCH_LOGS=graph_code): a constant stands for what eager mode computes, "
        "or the program asks torch.compiler.is_compiling()",
        "aot_autograd": "declare what {op} does: mutations and aliases in its schema, strides in its fake kernel",
        "decomposition": "report the decomposition of {op}",
        "joint_graph_passes": "report the pass",
        "post_grad_passes": "report the pass",
        "lowering": "report the lowering of {op}",
        "codegen": "report the code generated for {op}",
        LEFT_OUT: "report the code generated for {op}: it leaves out a part of the result, which holds what was there",
        "memory_planning": "report the memory planning",
        "runtime": "compile for one thread, or let {op} run eagerly",
        "inductor": "look at the kernels, which were not all checked",
        "rounding": "compare with a float64 reference instead of raising the tolerance: nothing but rounding was found",
    }
)
"""Stage → what to do, in the imperative."""


def advice_for(stage: str, op: str, cured_by: str) -> str:
    """Return what to do about a finding, and what makes it vanish until then."""
    if stage == "aot_autograd" and not op:
        return OF_TORCH
    text = ADVICE.get(stage, "").replace("{op}", op or "the op")
    return f"{text}; until then: {cured_by}" if text and cured_by else text
