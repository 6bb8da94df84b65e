"""Generated modules, shortened: what torch 2.15 makes for a CPU, what it made until 2.12, and one with Triton."""

from __future__ import annotations

HEADER = """\
# AOT ID: ['0_inference']
from ctypes import c_void_p, c_long, c_int
import torch
from math import inf, nan
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels

aten = torch.ops.aten
inductor_ops = torch.ops.inductor
_quantized = torch.ops._quantized
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()
"""

RELU = """\

#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{
    // def call(args):
    //     extern_kernels.mm(buf98, buf99, out=buf99)
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(1L))
    {
        auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
        TORCH_CHECK(tmp0 == tmp0, "no \\n // number");
        out_ptr0[static_cast<int64_t>(x0)] = std::max(tmp0, in_out_ptr0[x0]);
    }
}
"""

CPP = f"""\
{HEADER}

cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*', 'const float*', 'float*', 'const int64_t'], r'''{RELU}''')


cpp_fused_cat_1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{{
}}
''')


async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        new_callables = []
        for fn, c in zip(fns, self.partitions):
            new_callables.append(fn(c))
        self.partitions = new_callables

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s77 = arg0_1
        assert_size_stride(arg1_1, (s77, 8), (8, 1), 'input')
        buf0 = empty_strided_cpu((s77, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
        extern_kernels.mm(arg1_1, reinterpret_tensor(arg2_1, (8, 8), (1, 8), 0), out=buf0)
        buf1 = empty_strided_cpu((s77, 8), (8, 1), torch.float32)
        buf2 = reinterpret_tensor(buf0, (8, s77), (1, 8), 0); del buf0  # reuse
        cpp_fused_relu_0(buf2, arg1_1, buf1, s77)
        buf3 = extern_kernels.convolution(buf1, arg2_1, stride=(1, 1), groups=1, bias=None)
        aten.index_put_(buf2, [None, arg2_1], buf3, True)
        buf6 = torch.ops.aten.sort.stable(buf2, stable=True, dim=1, descending=False)
        buf7 = buf6[0]
        assert_tensor_metadata(buf7, (8, 16), (16, 1), torch.float32, 'torch.ops.aten.sort.stable')
        buf9 = buf6[2]
        del buf6
        buf10 = buf7; del buf7  # reuse
        torch.ops.zoo.bump.default(buf10, inf)
        buf14 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
        buf11 = reinterpret_tensor(buf14, (8, 8), (16, 1), 0)  # alias
        cpp_fused_cat_1(buf10, buf11)
        buf12 = reinterpret_tensor(buf14, (8, 8), (16, 1), 8)  # alias
        cpp_fused_cat_1(buf9, buf12)
        cpp_fused_relu_0(buf1, buf9, buf3, 8*s77)
        return (buf14, buf2, s77, )

runner = Runner(partitions=[])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns


def get_args():
    from torch._dynamo.testing import rand_strided
    arg0_1 = 8
    arg1_1 = arg0_1
    return [arg0_1, arg1_1]


def benchmark_compiled_module(args, times=10, repeat=10):
    return print_performance(lambda: call(list(args)), times=times, repeat=repeat, device='cpu')
"""


def line_of(text: str, part: str, number: int = 0) -> int:
    """The number of a line of a module that has this part, of several the one with that index."""
    return [line for line, words in enumerate(text.splitlines(), 1) if part in words][number]


TRITON_SOURCE = """\

import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics

@triton_heuristics.pointwise(
    size_hints={'x': 64},
    filename=__file__,
    triton_meta={'signature': {'in_out_ptr0': '*fp32', 'in_ptr0': '*fp32', 'out_ptr1': '*fp32', 'xnumel': 'i32', \
'XBLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0), 'constants': {}},
    inductor_meta={'kernel_name': 'triton_poi_fused_relu_0', 'mutated_arg_names': ['in_out_ptr0'], 'num_load': 1},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_relu_0(in_out_ptr0, in_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK  # of the block
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex), xindex < xnumel)
    tl.store(in_out_ptr0 + (xindex), triton_helpers.maximum(tmp0, 0.0), xindex < xnumel)
"""

TRITON = f"""\
{HEADER}
# kernel path: /tmp/torchinductor_root/ab/cab.py
# Topologically Sorted Source Nodes: [relu], Original ATen: [aten.relu]
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''{TRITON_SOURCE}''', device_str='cuda')

multi_kernel_0 = async_compile.multi_kernel('multi_kernel_0', [
    triton_poi_fused_relu_0,
])

async_compile.wait(globals())
del async_compile

def partition_0(args):
    arg0_1, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        buf1 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(buf0, arg0_1, buf1, 64, stream=stream0)
    return (buf0, buf1, )

def partition_1(args):
    buf0, buf1 = args
    args.clear()
    stream0 = get_raw_stream(0)
    triton_poi_fused_relu_0.run(buf0, buf1, buf1, 64, grid=grid(64), stream=stream0)
    return (buf0, )

def call(args):
    arg0_1, = args
    partition0_args = [arg0_1]
    (buf0, buf1) = partition_0(partition0_args)
    del partition0_args
    return (buf0, )
"""
