"""The private copy of Triton: the process's own is as before, and what is mended is right."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hashbench.extensions.compiled.as_device import interpreter
from hashbench.extensions.compiled.as_device.devices import DEVICES
from hashbench.extensions.compiled.as_device.kernels import InterpretedKernel, kernel_of

DEVICE = DEVICES["cuda:90"]

HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()
"""


def kernel(body: str, arguments: str, tmp_path: Path, *, numel: int = 8) -> InterpretedKernel:
    """A pointwise kernel of Inductor with this body, whose index is ``x0``."""
    names = [name.strip() for name in arguments.split(",")]
    kinds = {**{name.split(":")[0]: f"*{name.split(':')[1]}" for name in names}, "xnumel": "i32", "XBLOCK": "constexpr"}
    parameters = ", ".join([*(name.split(":")[0] for name in names), "xnumel", "XBLOCK: tl.constexpr"])
    source = f"""{HEAD}
@triton_heuristics.pointwise(
    size_hints={{'x': {numel}}},
    filename=__file__,
    triton_meta={{'signature': {kinds!r}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132,
        cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32), 'constants': {{}}, 'configs': []}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': 'k', 'mutated_arg_names': []}},
    min_elem_per_thread=0
)
@triton.jit
def k({parameters}):
    xoffset = tl.program_id(0) * XBLOCK
    x0 = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = x0 < xnumel
{body}
"""
    path = tmp_path / "k.py"
    path.write_text(source, encoding="utf-8")
    return kernel_of(source, str(path), "k", DEVICE)


def test_nothing_of_the_process_changes() -> None:
    import triton
    from torch._inductor.runtime import triton_helpers

    before = triton, triton_helpers, dict(os.environ), triton.jit, type(triton_helpers.prod).__name__
    interpreter.interpreted.cache_clear()
    copy = interpreter.interpreted(DEVICE)
    import triton as again

    assert (again, sys.modules["torch._inductor.runtime.triton_helpers"], dict(os.environ)) == before[:3]
    assert (triton.jit, type(triton_helpers.prod).__name__) == before[3:]
    assert copy.modules["triton"] is not triton
    assert type(copy.modules["torch._inductor.runtime.triton_helpers"].prod).__name__ == "InterpretedFunction"


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    body = """
    tl.store(out_ptr0 + (x0), tl.load(in_ptr0 + (x0), xmask).to(tl.float32) * 1.0, xmask)
    tl.store(out_ptr1 + (x0), tl.load(in_ptr1 + (x0), xmask).to(tl.float32) * 3.0, xmask)
"""
    made = kernel(body, "in_ptr0:fp32, in_ptr1:bf16, out_ptr0:bf16, out_ptr1:bf16", tmp_path, numel=4096)
    x = torch.randn(4096)
    x[:4] = torch.tensor([float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8])  # the last two are ties
    narrow = torch.randn(4096).bfloat16()
    out = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    made.run(x, narrow, *out, 4096, stream=0)
    assert torch.equal(out[0].nan_to_num(7), x.bfloat16().nan_to_num(7))
    assert torch.equal(out[1], (narrow.float() * 3).bfloat16())


def test_libdevice_and_helpers(tmp_path: Path) -> None:
    body = """
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), triton_helpers.maximum(libdevice.erf(tmp0), libdevice.rsqrt(tmp0)), xmask)
"""
    made = kernel(body, "in_ptr0:fp32, out_ptr0:fp32", tmp_path)
    x, out = torch.rand(8) + 0.5, torch.empty(8)
    made.run(x, out, 8)
    assert torch.allclose(out, torch.maximum(torch.erf(x), x.rsqrt()))


@pytest.mark.parametrize("dim", [0, 1])
def test_own_reductions_and_scans(tmp_path: Path, dim: int) -> None:
    body = f"""
    y = tl.arange(0, 4)[None, :]
    tmp0 = tl.load(in_ptr0 + (x0[:, None] * 4 + y))
    value, place = triton_helpers.max_with_index(tmp0, tl.broadcast_to(y + x0[:, None] * 4, tmp0.shape), {dim})
    tl.store(out_ptr0 + tl.arange(0, {4 if dim == 0 else 8}), value)
    tl.store(out_ptr1 + tl.arange(0, {4 if dim == 0 else 8}), place)
    total = tl.associative_scan(tmp0, {dim}, triton_helpers._prod_accumulate)
    tl.store(out_ptr2 + (x0[:, None] * 4 + y), total)
"""
    made = kernel(body, "in_ptr0:fp32, out_ptr0:fp32, out_ptr1:i32, out_ptr2:fp32", tmp_path)
    x = torch.randn(8, 4)
    size = 4 if dim == 0 else 8
    value, place, products = torch.empty(size), torch.empty(size, dtype=torch.int32), torch.empty(8, 4)
    made.run(x, value, place, products, 8)
    found = x.max(dim)
    assert torch.equal(value, found.values)
    at = torch.arange(32, dtype=torch.int32).view(8, 4)
    assert torch.equal(place, at.gather(dim, found.indices.unsqueeze(dim)).squeeze(dim))
    assert torch.allclose(products, x.cumprod(dim))


@pytest.mark.parametrize(("body", "said"), [("xnumel + 4096 + x0", "outside of its arguments"), ("x0 * 0", "")])
def test_memory_of_others_is_not_reached(tmp_path: Path, body: str, said: str) -> None:
    made = kernel(
        f"    tl.store(out_ptr0 + (x0), tl.load(in_ptr0 + ({body}), xmask), xmask)",
        "in_ptr0:fp32, out_ptr0:fp32",
        tmp_path,
    )
    x, out = torch.randn(8), torch.empty(8)
    if said:
        with pytest.raises(interpreter.NotInterpretedError, match=said):
            made.run(x, out, 8)
    else:
        made.run(x, out, 8)
        assert torch.equal(out, x[:1].expand(8))
