"""Digests of sources that only differ in what does not matter, and the comparison of two compilations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hashbench.core.inductor import wrapper
from hashbench.core.inductor.wrapper import KernelSource
from hashbench.extensions.compiled import sources
from hashbench.extensions.compiled.compiled_kernels import ListedKernel
from hashbench.extensions.compiled.sources import KernelPair, compare, source_digest
from tests.core.inductor.wrappers import CPP, RELU, TRITON, TRITON_SOURCE

CPP_KERNEL, TRITON_KERNEL = wrapper.kernels(CPP)[0], wrapper.kernels(TRITON)[0]


def renamed(kernel: KernelSource, name: str) -> KernelSource:
    return replace(kernel, name=name, source=kernel.source.replace(kernel.name, name))


SAME: dict[str, tuple[KernelSource, KernelSource]] = {
    "another name of a kernel in C++": (CPP_KERNEL, renamed(CPP_KERNEL, "cpp_fused_relu_17")),
    "another name of a Triton kernel": (TRITON_KERNEL, renamed(TRITON_KERNEL, "triton_poi_fused_relu_12")),
    "other comments in C++": (
        CPP_KERNEL,
        replace(CPP_KERNEL, source=RELU.replace("    // def call(args):\n", "    /* of\n line 3 */\n")),
    ),
    "other comments in Python": (
        TRITON_KERNEL,
        replace(TRITON_KERNEL, source=TRITON_SOURCE.replace("  # of the block", "\n\n# of 'one\n")),
    ),
    "other settings of autotuning": (
        TRITON_KERNEL,
        replace(TRITON_KERNEL, source=TRITON_SOURCE.replace("'num_load': 1", "'num_load': 1, 'max_autotune': True")),
    ),
    "white space at the end of lines": (CPP_KERNEL, replace(CPP_KERNEL, source=RELU.replace(";\n", ";  \n\n"))),
    "another folder of an included file": (
        KernelSource("k", "cpp", (), '\n#include "/tmp/torchinductor_me/pi/cpi.h"\nint kernel();\n'),
        KernelSource("k", "cpp", (), '\n#include "/var/cache/other.d/cpi.h"\nint kernel();\n'),
    ),
    "a name inside another one": (
        KernelSource("cpp_gemm_3", "cpp", (), "\nint cpp_gemm_3_micro(); int cpp_gemm_3();\n"),
        KernelSource("cpp_gemm_4", "cpp", (), "\nint cpp_gemm_4_micro(); int cpp_gemm_4();\n"),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_same_source(case: str) -> None:
    first, second = SAME[case]
    assert first != second
    assert source_digest(first) == source_digest(second)


OTHER: dict[str, tuple[KernelSource, KernelSource]] = {
    "a constant": (CPP_KERNEL, replace(CPP_KERNEL, source=RELU.replace("0L", "1L"))),
    "a type": (CPP_KERNEL, replace(CPP_KERNEL, source=RELU.replace("float*", "double*"))),
    "a text with slashes": (CPP_KERNEL, replace(CPP_KERNEL, source=RELU.replace("// number", "// finite"))),
    "what follows a text with slashes": (
        CPP_KERNEL,
        replace(CPP_KERNEL, source=RELU.replace('number")', 'number",1)')),
    ),
    "a meta of Triton": (TRITON_KERNEL, replace(TRITON_KERNEL, source=TRITON_SOURCE.replace("64", "128"))),
    "an indentation in Python": (
        KernelSource("k", "triton", (), "\nif a:\n    b = 1\nc = 2\n"),
        KernelSource("k", "triton", (), "\nif a:\n    b = 1\n    c = 2\n"),
    ),
    "another included file": (
        KernelSource("k", "cpp", (), '\n#include "/tmp/pi/cpi.h"\n'),
        KernelSource("k", "cpp", (), '\n#include "/tmp/pi/cpj.h"\n'),
    ),
    "a division": (
        KernelSource("k", "cpp", (), "\nx = a/b/c;\n"),
        KernelSource("k", "cpp", (), "\nx = a/d/c;\n"),
    ),
    "two words that a comment joins": (
        KernelSource("k", "cpp", (), "\nint/**/x;\n"),
        KernelSource("k", "cpp", (), "\nintx;\n"),
    ),
    "a kernel with a longer number": (
        KernelSource("cpp_relu_1", "cpp", (), "\ncpp_relu_1();\n"),
        KernelSource("cpp_relu_1", "cpp", (), "\ncpp_relu_12();\n"),
    ),
    "the kind": (KernelSource("k", "cpp", (), "\nx\n"), KernelSource("k", "triton", (), "\nx\n")),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_source(case: str) -> None:
    first, second = OTHER[case]
    assert source_digest(first) != source_digest(second)


def kernel(name: str, source: str = "s", reads: str = "a", writes: str = "b", **more: object) -> ListedKernel:
    return ListedKernel(name, source, tuple(reads), tuple(writes), **more)  # type: ignore[arg-type]


RELU_0, ADD_1, MM = kernel("cpp_fused_relu_0"), kernel("cpp_fused_add_1"), kernel("extern_kernels.mm", source="")

Change = Callable[[ListedKernel], ListedKernel]

PAIRS: dict[str, tuple[ListedKernel | None, ListedKernel | None, bool, bool]] = {
    "equal": (RELU_0, RELU_0, False, False),
    "another name": (RELU_0, kernel("cpp_fused_relu_7"), False, False),
    "another source, same bits": (RELU_0, kernel("cpp_fused_relu_0", "t"), True, False),
    "another source, other bits": (RELU_0, kernel("cpp_fused_relu_0", "t", writes="c"), True, True),
    "same source, other bits": (RELU_0, kernel("cpp_fused_relu_0", writes="c"), False, True),
    "other inputs, so other bits": (RELU_0, kernel("cpp_fused_relu_0", reads="x", writes="c"), False, False),
    "other inputs and source": (RELU_0, kernel("cpp_fused_relu_0", "t", reads="x", writes="c"), True, False),
    "other bits of an op": (MM, kernel("extern_kernels.mm", "", writes="c"), False, True),
    "an op became a kernel": (MM, kernel("cpp_CppMicroGemm_0", "t"), True, False),
    "arguments in another order": (
        kernel("k_0", reads="ab", writes="cd"),
        kernel("k_0", "t", reads="ba", writes="dc"),
        True,
        False,
    ),
    "inputs exchanged": (kernel("k_0", reads="ab"), kernel("k_0", reads="ba", writes="c"), False, False),
    "outputs exchanged": (kernel("k_0", writes="ab"), kernel("k_0", writes="ba"), False, True),
    "more outputs, other source": (kernel("k_0", writes="ab"), kernel("k_0", "t", writes="abb"), True, True),
    "no inputs": (kernel("k_0", reads=""), kernel("k_0", reads="", writes="c"), False, True),
    "bits not recorded": (kernel("k_0", reads="", writes=""), kernel("k_0", reads="", writes="c"), False, False),
    "only in the first": (RELU_0, None, True, False),
    "only in the second": (None, RELU_0, True, False),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pair(case: str) -> None:
    first, second, by_source, by_bits = PAIRS[case]
    pair = KernelPair(first, second)
    assert (pair.differs_by_source, pair.differs_by_bits) == (by_source, by_bits)
    assert pair.shown == (second or first)


SLOW, FAST = "XBLOCK 1024, 4 warps, 1 stage", "XBLOCK 512, 8 warps, 1 stage"


def test_other_bits_of_another_configuration_are_told_with_both() -> None:
    first, second = (kernel("triton_red_0", launch=launch, writes=bits) for launch, bits in ((SLOW, "b"), (FAST, "c")))
    pair = KernelPair(first, second)
    assert pair.differs_by_bits
    assert pair.launches == f"{SLOW} against {FAST}"
    assert pair.what == (
        f"the same source, another configuration ({SLOW} against {FAST}), and different bits on equal inputs"
    )
    assert KernelPair(first, replace(second, launch=SLOW)).what == "different bits on equal inputs"
    assert KernelPair(first, replace(second, launch="")).launches == ""
    assert KernelPair(first, replace(second, source="t")).what == "another source"


def test_another_configuration_alone_is_no_difference() -> None:
    assert compare([kernel("triton_0", launch=SLOW)], [kernel("triton_0", launch=FAST)]).equal


def test_pair_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="one side at least"):
        _ = KernelPair(None, None).shown


def test_equal_compilations_with_other_names() -> None:
    names = [replace(RELU_0, name="cpp_fused_relu_4"), MM, replace(ADD_1, name="cpp_fused_add_0")]
    difference = compare([RELU_0, MM, ADD_1], names)
    assert difference.equal
    assert (difference.by_source, difference.by_bits, difference.first) == ((), (), None)
    assert (difference.kernels, difference.same_inputs) == ((3, 3), 3)


def test_inserted_kernel_shifts_nothing() -> None:
    clone = kernel("cpp_fused_clone_0")
    difference = compare([RELU_0, MM, ADD_1], [clone, RELU_0, MM, replace(ADD_1, writes=("c",))])
    assert difference.by_source == (KernelPair(None, clone),)
    assert difference.by_bits == (KernelPair(ADD_1, replace(ADD_1, writes=("c",))),)
    assert difference.first == KernelPair(None, clone)
    assert not difference.equal


def test_first_is_the_earliest_of_both_kinds() -> None:
    other = replace(RELU_0, writes=("c",))
    difference = compare([RELU_0, ADD_1], [other, replace(ADD_1, source="t", reads=("c",))])
    assert difference.first == KernelPair(RELU_0, other)
    assert [pair.shown.name for pair in difference.by_source] == ["cpp_fused_add_1"]
    assert difference.same_inputs == 1


def test_calls_correspond_by_ops_module_phase_and_graph() -> None:
    one = kernel("cpp_fused_0", ops=("aten.relu",), module="a")
    for changed in ({"module": "b"}, {"phase": "backward"}, {"graph": 1}, {"ops": ("aten.relu", "aten.add")}):
        other = replace(one, **changed)
        assert compare([one], [other]).by_source == (KernelPair(one, None), KernelPair(None, other))
    assert compare([one], [replace(one, name="cpp_fused_relu_9")]).equal


def test_kernel_called_by_many_layers() -> None:
    layers = [replace(RELU_0, module=f"layer{number}", ops=("aten.relu",)) for number in range(12)]
    changed = [*layers[:7], replace(layers[7], writes=("c",)), *layers[8:]]
    assert [pair.shown.module for pair in compare(layers, changed).by_bits] == ["layer7"]
    assert compare(layers, layers[1:]).by_source == (KernelPair(layers[0], None),)


@pytest.mark.parametrize(
    ("cut", "alone"),
    [((False, False), 1), ((False, True), 0), ((True, False), 1), ((True, True), 0)],
)
def test_calls_that_were_left_out_are_not_judged(cut: tuple[bool, bool], alone: int) -> None:
    assert len(compare([RELU_0, MM, ADD_1], [RELU_0, MM], cut=cut).by_source) == alone


def test_nothing_in_common_and_all_cut() -> None:
    assert compare([], [MM], cut=(True, True)).equal


def test_thousands_of_calls_with_other_ops() -> None:
    first = [kernel(f"k{number}", module=str(number)) for number in range(2000)]
    second = [replace(one, module=f"m{one.module}") if int(one.module) % 3 else one for one in first]
    difference = compare(first, second)
    assert difference.same_inputs == 667
    assert len(difference.by_source) == 2 * 1333


@pytest.mark.slow
def test_compilations_of_the_installed_torch() -> None:
    import torch
    from torch._inductor.utils import run_and_get_code

    def compiled(**options: int) -> list[str]:
        def program(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x @ x).sum(1)

        torch._dynamo.reset()
        _, (text,) = run_and_get_code(torch.compile(program, options={**options}), torch.randn(16, 16))
        return [sources.source_digest(one) for one in wrapper.kernels(text)]

    with torch.no_grad():
        first, again, scalar = compiled(), compiled(), compiled(**{"cpp.simdlen": 1})  # no vector unit has 1 bit
    assert first
    assert first == again
    assert first != scalar
