"""What a Triton kernel gets, reads and writes, from its text."""

from __future__ import annotations

import pytest

from hashbench.core.inductor.triton_source import TritonArgument, arguments_of, is_loaded_first, kernel_name


def source(signature: str, body: str, parameters: str = "", *, mutated: str = "[]", before: str = "") -> str:
    names = parameters or ", ".join(part.partition(":")[0].strip(" '{}") for part in signature.split(","))
    return f"""
import triton
import triton.language as tl
{before}
@triton_heuristics.pointwise(
    triton_meta={{'signature': {signature}, 'constants': {{}}}},
    inductor_meta={{'mutated_arg_names': {mutated}}},
)
@triton.jit
def kernel({names}):
    {body}
"""


def accesses(text: str) -> list[str]:
    """Each argument as ``name``, with ``r`` and ``w`` behind it."""
    return [f"{one.name} {'r' * one.reads}{'w' * one.writes}".strip() for one in arguments_of(text)]


TWO = "{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'}"


def test_arguments_have_types_and_accesses() -> None:
    text = source(TWO, "tl.store(out_ptr0 + x, tl.load(in_ptr0 + x))")
    assert arguments_of(text) == (
        TritonArgument("in_ptr0", "*fp32", reads=True),
        TritonArgument("out_ptr0", "*fp32", writes=True),
        TritonArgument("xnumel", "i32"),
    )


def test_a_size_of_one_is_passed_and_a_block_size_is_not() -> None:
    signature = "{'in_ptr0': '*fp32', 'xnumel': 'constexpr', 'ws_ptr': '*u8', 'XBLOCK': 'constexpr'}"
    text = source(signature, "pass", "in_ptr0, xnumel, ws_ptr, XBLOCK : tl.constexpr")
    assert [(one.name, one.kind) for one in arguments_of(text)] == [
        ("in_ptr0", "*fp32"),
        ("xnumel", "constexpr"),
        ("ws_ptr", "*u8"),
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("tl.store(out_ptr0 + x, tl.load(in_ptr0 + x))", ["in_ptr0 r", "out_ptr0 w", "xnumel"]),
        ("tl.atomic_add(in_ptr0 + x, 1.0, xmask, sem='relaxed')", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("p = in_ptr0 + x\n    q = p + 1\n    tl.store(q, 1)", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("p = out_ptr0 + tl.load(in_ptr0)\n    tl.store(p, 1)", ["in_ptr0 r", "out_ptr0 w", "xnumel"]),
        ("p = tl.make_block_ptr(base=in_ptr0)\n    tl.store(p, 1)", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("d = tl.make_tensor_descriptor(in_ptr0)\n    d.store([0], 1)", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("unknown(in_ptr0)", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("helper(x, in_ptr0)", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
        ("other = helper(in_ptr0, x)", ["in_ptr0 r", "out_ptr0 w", "xnumel"]),
        ("tl.store(out_ptr0, triton_helpers.maximum(tl.load(in_ptr0), 0))", ["in_ptr0 r", "out_ptr0 w", "xnumel"]),
        ("not python (", ["in_ptr0 rw", "out_ptr0 w", "xnumel"]),
    ],
)
def test_what_a_store_reaches_is_written_whatever_its_name(body: str, expected: list[str]) -> None:
    before = "@triton.jit\ndef helper(values, to):\n    tl.store(to, tl.load(values))\n"
    assert accesses(source(TWO, body, before=before)) == expected


def test_scratch_memory_is_read_and_written_and_what_is_mutated_is_read() -> None:
    signature = (
        "{'out_ptr0': '*fp32', 'sem_ptr': '*u32', 'ws_ptr': '*u8', 'in_out_ptr0': '*fp32', 'in_out_ptr1': '*fp32'}"
    )
    body = "tmp = tl.load(in_out_ptr0)\n    tl.store(in_out_ptr0, tmp)\n    tl.store(in_out_ptr1, tmp)"
    text = source(signature, body, mutated="['in_out_ptr0', 'in_out_ptr1']")
    assert accesses(text) == ["out_ptr0 w", "sem_ptr rw", "ws_ptr rw", "in_out_ptr0 rw", "in_out_ptr1 w"]
    atomic = source(TWO, "tl.atomic_add(out_ptr0 + x, tl.load(in_ptr0 + x))", mutated="['out_ptr0']")
    assert accesses(atomic) == ["in_ptr0 r", "out_ptr0 rw", "xnumel"]


USERS = """
@triton_heuristics.user_autotune(
    configs=[], inductor_meta={'extra_launcher_args': ['_grid_0']}, filename=__file__, custom_kernel=True,
    triton_meta={'signature': {'x_ptr': '*fp32', 'to_ptr': '*fp32', 'n': 'i32', 'BLOCK': 'constexpr'}},
)
@triton.jit
def scaled(x_ptr, to_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    put(to_ptr + index, tl.load(x_ptr + index, mask=index < n) * 2, index < n)

@triton.jit
def put(place, value, mask):
    tl.store(place, value, mask=mask)
"""


def test_a_kernel_of_the_user_writes_what_its_text_says() -> None:
    assert kernel_name(USERS) == "scaled"
    assert accesses(USERS) == ["x_ptr r", "to_ptr rw", "n", "_grid_0"]
    assert kernel_name("") == kernel_name("not python (") == ""


def test_the_grid_of_a_template_is_passed_behind_its_arguments() -> None:
    text = source(TWO, "tl.store(out_ptr0, tl.load(in_ptr0))")
    text = text.replace("inductor_meta={", "inductor_meta={'extra_launcher_args': ['_grid_0', '_grid_1'], ")
    assert [one.kind for one in arguments_of(text)] == ["*fp32", "*fp32", "i32", "i32", "i32"]
    assert [one.name for one in arguments_of(text)][3:] == ["_grid_0", "_grid_1"]


def test_a_source_without_a_signature_has_unknown_arguments() -> None:
    assert arguments_of("\nsomething else\n") == arguments_of("") == ()


def test_first_use_in_cpp_decides_too() -> None:
    assert is_loaded_first("in_out_ptr0", "auto tmp = in_out_ptr0[x0];\nin_out_ptr0[x0] = tmp;")
    assert not is_loaded_first("in_out_ptr0", "    in_out_ptr0[x0] = tmp0;")
