"""Generate ``repro.py``, one captured call as a script that needs torch alone and no knowledge of hashbench."""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.diagnose.calls.call import (
    LINE,
    CapturedCall,
    GeneratorSlot,
    Slot,
    TensorForm,
    compiled_kernel,
    filled_slots,
    generator_slots,
    is_triton,
    plan_for,
)
from hashbench.core.diagnose.calls.capture import may_resize
from hashbench.core.diagnose.calls.ops import needs_definition
from hashbench.core.diagnose.replay.methods import possible_shifts
from hashbench.core.diagnose.repro.call_arguments import bad, is_named
from hashbench.core.diagnose.repro.writer import render, templates
from hashbench.core.inductor.triton_source import kernel_name
from hashbench.core.records import Evidence, ExperimentResult

# ------------------------------------------------------------------------------------- what is repeated, how often

_FEWEST, _USUAL, _MOST = 20, 500, 5000
"""Calls at most: of slow ops, of any, and where they differ rarely. Many, because on a busy machine threads run one
after the other, and what differed in each of 20 calls differs in one of a hundred. A script that sees a difference
stops at 20."""

_SECONDS, _MOST_BYTES = 5.0, 2**32
"""What all calls of a script together should take at most, as far as the fewest allow; and what the memories of one
that uses new ones for each call take together."""

_MISS = 0.01
"""Chance that a script shows nothing though calls differ at half the rate that was seen."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The experiment that shows the difference: its template, the calls after the first, and the shifts of memory."""

    variant: str
    calls: int
    moves: tuple[tuple[int | None, int], ...] = ()


_WITH_SNAPSHOT = ("cuda", "xpu")
"""Kinds of device that are numbered, and whose allocator reports its free blocks."""

_TEMPLATE = "experiments/{}.py.jinja"

SHOWING = tuple(name for name in EXPERIMENTS if _TEMPLATE.format(name) in templates())
"""Experiments that a script can repeat."""


def plan(evidence: Evidence) -> Plan:
    """Choose the first experiment that showed a difference, ``poison`` before all, and the calls needed to see one."""
    for name in sorted(SHOWING, key=lambda name: name != "poison"):
        result = evidence.arm(name, "call")
        if result.differing:
            half = result.differing / result.trials / 2
            calls = max(_USUAL, math.ceil(math.log(_MISS) / math.log1p(-half)))
            return Plan(name, _affordable(calls, result), result.moves)
    poisoned = evidence.arm("poison", "pair")
    if poisoned.differing and evidence.call is not None and evidence.call.allocation:  # of a call alone no arm is made
        return Plan("poison", _affordable(_USUAL, poisoned))
    return Plan("repeat", _affordable(_USUAL, evidence.arm("repeat", "call")))


def _affordable(calls: int, result: ExperimentResult) -> int:
    return min(calls, _MOST, max(_FEWEST, int(_SECONDS / result.seconds)) if result.seconds else _MOST)


# ---------------------------------------------------------------------------------------------------------- the text


def source(call: CapturedCall, how: Plan, *, heading: str, definition: str = "", requirements: str = "") -> str:
    """Render the script from the template of the experiment that it repeats.

    Args:
        heading: the observation, in a few lines.
        definition: where a custom op is defined.
        requirements: the header of :func:`hashbench.core.diagnose.repro.writer.metadata`.

    Raises:
        BadCallError: an argument cannot be written as Python.
    """
    calls = how.calls
    if how.variant == "fresh_memory" and call.nbytes:  # each call keeps its memory
        calls = max(2, min(calls, _MOST_BYTES // call.nbytes))
    return render(
        _TEMPLATE.format(how.variant),
        variant=how.variant,
        demo=EXPERIMENTS[how.variant].demo,
        calls=calls,
        moves=moves_of(call, how.moves) if how.variant == "moved" else [],
        **call_values(call, heading=heading, definition=definition, requirements=requirements),
    )


def call_values(call: CapturedCall, *, heading: str, definition: str = "", requirements: str = "") -> dict[str, Any]:
    """Return the values of ``repro.py.jinja`` that follow from the call alone; arguments as of :func:`source`.

    Raises:
        BadCallError: an argument cannot be written as Python.
    """
    custom, kind, own_device = needs_definition(call.func), call.device.type, _device(call, call.device)
    kernel = compiled_kernel(call.func)
    workspace = call.settings.get("CUBLAS_WORKSPACE_CONFIG", "") if kind == "cuda" else ""
    called = expression(call)
    return {
        "metadata": requirements,
        "heading": heading.rstrip(),
        "custom": custom,
        "definition": definition,
        "kernel_types": "" if kernel is None else json.dumps(list(kernel.types)),
        "kernel_name": "" if kernel is None else kernel_name(kernel.source) if is_triton(kernel.types) else call.op,
        "triton": kernel is not None and is_triton(kernel.types),
        "kernel_config": "" if kernel is None or not is_triton(kernel.types) else kernel.config,
        "workspace": json.dumps(workspace) if workspace else "",
        "device_statements": _device_statements(call),
        "settings": settings_statements(call),
        "threads": call.threads,
        "kind": kind,
        "device": own_device,
        "allocator_snapshot": kind in _WITH_SNAPSHOT,
        "memories": [
            (memory.alignment % LINE, "" if device.type == "cpu" else _device(call, device))
            for memory, device in ((memory, memory.content.device) for memory in call.memories)
        ],
        "resizes": may_resize(call.func) and not any(memory.alignment % LINE for memory in call.memories),
        "tensors": [_tensor(call, index, custom=custom) for index in range(len(call.tensors))],
        "other_kinds": any(not isinstance(form, TensorForm) for form in call.tensors),
        "generators": generators(call),
        "random_states": _random_states(call) if custom or plan_for(call.func).seeded else [],
        "seeds": custom,
        "filled": list(filled_slots(call)) if kernel is not None else [],
        "inference": call.settings.get("inference_mode") == "True",
        # with the script's own name for its device
        "expression": called.replace(f'torch.device("{call.device}")', f"torch.device({own_device})"),
    }


def _device_statements(call: CapturedCall) -> list[str]:
    """Return statements that choose the call's accelerator (the first, where the machine has fewer) and make it
    current, which kernels of custom ops may rely on."""
    if call.device.type not in _WITH_SNAPSHOT:
        return []
    kind, index = call.device.type, call.device.index
    if len(call.accelerators) > 1:
        return [f'torch.{kind}.set_device("{call.device}")']
    otherwise = f' if torch.{kind}.device_count() > {index} else "{kind}:0"' if index else ""
    return [f'DEVICE = "{call.device}"{otherwise}', f"torch.{kind}.set_device(DEVICE)"]


def _device(call: CapturedCall, device: torch.device) -> str:
    """Format a device as Python."""
    own = call.device.type in _WITH_SNAPSHOT and call.accelerators == (device,)
    return "DEVICE" if own else f'"{device}"'


def moves_of(call: CapturedCall, shifts: Sequence[tuple[int | None, int]]) -> list[list[int]]:
    """Return the shift of each memory in bytes, for each move: those that showed a difference, else all shifts that
    keep elements aligned to their size."""
    count = len(call.memories)
    moves = [[shift if memory in (None, index) else 0 for index in range(count)] for memory, shift in shifts]
    return moves or [[shift] * count for shift in possible_shifts(call, None)]


# ------------------------------------------------------------------------------------------------------- its settings

_DEFAULTS: Mapping[str, tuple[str, str]] = {
    "deterministic_algorithms": ("off", "torch.use_deterministic_algorithms(True{})"),
    "fill_uninitialized_memory": ("True", "torch.utils.deterministic.fill_uninitialized_memory = {}"),
    "default_dtype": ("torch.float32", "torch.set_default_dtype({})"),
    "flush_denormal": ("False", "torch.set_flush_denormal({})"),
    "float32_matmul_precision": ("highest", 'torch.set_float32_matmul_precision("{}")'),
    "mkldnn.enabled": ("True", "torch.backends.mkldnn.enabled = {}"),
    "mkldnn.deterministic": ("False", "torch.backends.mkldnn.deterministic = {}"),
    "mkldnn.matmul.fp32_precision": ("none", 'torch.backends.mkldnn.matmul.fp32_precision = "{}"'),
    "mkldnn.conv.fp32_precision": ("none", 'torch.backends.mkldnn.conv.fp32_precision = "{}"'),
    "sdp.math": ("True", "torch.backends.cuda.enable_math_sdp({})"),
    "sdp.flash": ("True", "torch.backends.cuda.enable_flash_sdp({})"),
    "sdp.mem_efficient": ("True", "torch.backends.cuda.enable_mem_efficient_sdp({})"),
    "sdp.cudnn": ("True", "torch.backends.cuda.enable_cudnn_sdp({})"),
    "sdp.fp16_bf16_reduction": ("False", "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp({})"),
}
"""Setting → its default in a new process, and the statement that changes it."""

_MATMUL = "torch.backends.cuda.matmul"
_CUDA_DEFAULTS: Mapping[str, tuple[str, str]] = {
    "cudnn.enabled": ("True", "torch.backends.cudnn.enabled = {}"),
    "cudnn.deterministic": ("False", "torch.backends.cudnn.deterministic = {}"),
    "cudnn.benchmark": ("False", "torch.backends.cudnn.benchmark = {}"),
    "cuda.matmul.fp16_reduction": ("True", f"{_MATMUL}.allow_fp16_reduced_precision_reduction = {{}}"),
    "cuda.matmul.bf16_reduction": ("True", f"{_MATMUL}.allow_bf16_reduced_precision_reduction = {{}}"),
}
_OLDER_TF32: Mapping[str, tuple[str, str]] = {
    "cudnn.allow_tf32": ("True", "torch.backends.cudnn.allow_tf32 = {}"),
    "cuda.matmul.allow_tf32": ("False", "torch.backends.cuda.matmul.allow_tf32 = {}"),
}
_NEWER_TF32: Mapping[str, tuple[str, str]] = {
    "cudnn.conv.fp32_precision": ("tf32", 'torch.backends.cudnn.conv.fp32_precision = "{}"'),
    "cudnn.rnn.fp32_precision": ("tf32", 'torch.backends.cudnn.rnn.fp32_precision = "{}"'),
    "cuda.matmul.fp32_precision": ("none", 'torch.backends.cuda.matmul.fp32_precision = "{}"'),
}
_SPELLED = {("deterministic_algorithms", "on"): "", ("deterministic_algorithms", "warn"): ", warn_only=True"}


def settings_statements(call: CapturedCall) -> list[str]:
    """Return statements for the settings of the call that are not a new process's defaults.

    TF32 by torch's older names, which set the newer ones, too; by the newer ones where those were set to a value that
    the older ones cannot express: torch then does not update the older ones, and raises where both are used. Before the
    precision of matrix products, which is finer than the older name for it.
    """
    table = {**_DEFAULTS}
    if call.device.type == "cuda":
        older = all(name in call.settings for name in _OLDER_TF32)
        table = {**_CUDA_DEFAULTS, **(_OLDER_TF32 if older else _NEWER_TF32), **_DEFAULTS}
    given = {name: call.settings.get(name, default) for name, (default, _) in table.items()}
    return [
        statement.format(_SPELLED.get((name, given[name]), given[name]))
        for name, (default, statement) in table.items()
        if given[name] != default
    ]


# ------------------------------------------------------------------------------------------------- inputs and the call


def _tensor(call: CapturedCall, index: int, *, custom: bool) -> str:
    form = call.tensors[index]
    if not isinstance(form, TensorForm):
        place = sum(not isinstance(before, TensorForm) for before in call.tensors[:index])
        return f'saved["whole"][{place}].clone()' + (
            "" if form.device.type == "cpu" else f".to({_device(call, form.device)})"
        )
    text = f"view(m[{form.storage}], {form.dtype}, {form.shape}, {form.stride}, {form.offset})"
    text = f"torch.conj({text})" if form.conj else text
    text = f"torch._neg_view({text})" if form.neg else text
    if custom and form.parameter:  # torch's own kernels see neither
        return f"torch.nn.Parameter({text}, {form.requires_grad})"
    return f"{text}.requires_grad_()" if custom and form.requires_grad else text


def generators(call: CapturedCall) -> list[str]:
    """Return the generator arguments, in their captured states, as Python."""
    devices = {slot.index: slot.device for slot in generator_slots([call.args, call.kwargs])}
    names = {index: _device(call, torch.device(name)) for index, name in devices.items()}
    return [f'torch.Generator({names[index]}).set_state(saved["generators"][{index}])' for index in sorted(names)]


def _random_states(call: CapturedCall) -> list[str]:
    """Return statements that restore torch's default generators."""
    lines = []
    for name in call.random_states:
        state = f'saved["random_states"]["{name}"]'
        if name == "cpu":
            lines.append(f"torch.set_rng_state({state})")
        elif name not in ("python", "numpy"):
            device = torch.device(name)
            lines.append(f"torch.{device.type}.set_rng_state({state}, {_device(call, device)})")
    return lines


# ------------------------------------------------------------------------------------------------------ as Python


def expression(call: CapturedCall) -> str:
    """Format the call as Python: ``torch.ops.aten.index_put_.default(t[0], [t[1]], t[2], True)``; of a generated kernel
    ``kernel(t[0], t[1])``.

    Raises:
        BadCallError: an argument cannot be written.
    """
    arguments = [as_python(value) for value in call.args]
    name = "kernel" if compiled_kernel(call.func) is not None else op_name(call.op)
    for key, value in call.kwargs.items():
        arguments.append(
            f"**{{{key!r}: {as_python(value)}}}" if keyword.iskeyword(key) else f"{key}={as_python(value)}"
        )
    return f"{name}({', '.join(arguments)})"


def op_name(op: str) -> str:
    """Format an op as Python: ``torch.ops.aten.add.Tensor``."""
    name = "torch.ops"
    for part in op.split("."):
        name = f'getattr({name}, "{part}")' if keyword.iskeyword(part) else f"{name}.{part}"
    return name


def as_python(value: Any) -> str:
    """Format an argument as Python, with ``t`` for the tensors and ``g`` for the generators."""
    match value:
        case Slot(index):
            return f"t[{index}]"
        case GeneratorSlot(index):
            return f"g[{index}]"
        case None | bool() | int() | str():
            return repr(value)
        case float():
            return repr(value) if math.isfinite(value) else f'float("{value!r}")'
        case complex():
            return f"complex({as_python(value.real)}, {as_python(value.imag)})"
        case torch.device():
            return f'torch.device("{value}")'
        case list():
            return f"[{', '.join(map(as_python, value))}]"
        case tuple():
            return f"({', '.join(map(as_python, value))}{',' if len(value) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {as_python(item)}' for key, item in value.items())}}}"
    return str(value) if is_named(value) else bad(f"an argument is a {type(value).__name__}")
