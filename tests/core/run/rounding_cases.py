"""Kernels right and wrong beside their references: what the judge of rounding is calibrated on.

``python -m tests.core.run.rounding_cases`` prints a line for each that is judged otherwise, and the shares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hashbench.core.run.rounding_judge import JudgedResult, judge_results
from hashbench.core.run.rounding_reference import ReferenceRuns

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A kernel, its reference and inputs.

    Attributes:
        name: what it does.
        right: whether the kernel is right.
        shows: whether a wrong one shows on these inputs; others are found where inputs are varied.
    """

    name: str
    right: bool
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[Any, ...]
    shows: bool = True


def wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in float32 and round once."""

    def kernel(*inputs: Any) -> Tensor:
        floats = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        return function(*floats).to(inputs[0].dtype)

    return kernel


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def online(x: Tensor, *, cut: int = 64, drop: int = 0, rescale: bool = True) -> Tensor:
    high, total = torch.full(x.shape[:-1], -torch.inf), torch.zeros(x.shape[:-1])
    parts = x.split(cut, -1)
    for part in parts[: len(parts) - drop]:
        new = torch.maximum(high, part.amax(-1))
        total = total * ((high - new).exp() if rescale else 1.0) + (part - new[..., None]).exp().sum(-1)
        high = new
    return (x - high[..., None]).exp() / total[..., None]


def exp2_softmax(x: Tensor, base: float = math.log2(math.e)) -> Tensor:
    powers = torch.exp2((x - x.amax(-1, keepdim=True)) * base)
    return powers * (1 / powers.sum(-1, keepdim=True))


def split_k(a: Tensor, b: Tensor, parts: int = 8) -> Tensor:
    return sum(p @ q for p, q in zip(a.chunk(parts, 1), b.chunk(parts, 0), strict=True))  # type: ignore[return-value]


def sequential_k(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


def low_accumulators(a: Tensor, b: Tensor, parts: int = 32) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for p, q in zip(a.chunk(parts, 1), b.chunk(parts, 0), strict=True):
        total = total + p @ q
    return total


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


def one_pass(x: Tensor, eps: float = 1e-5, terms: int = 0) -> Tensor:
    terms = terms or x.shape[-1]
    mean = x.sum(-1, keepdim=True) / terms
    variance = (x * x).sum(-1, keepdim=True) / terms - mean**2
    return (x - mean) * (variance + eps).rsqrt()


def two_passes(x: Tensor, eps: float = 1e-5, correction: int = 0) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().sum(-1, keepdim=True) / (x.shape[-1] - correction)
    return (x - mean) / (variance + eps).sqrt()


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


def scan(x: Tensor, cut: int = 64, carried: bool = True) -> Tensor:
    parts, carry = [], torch.zeros_like(x[:, :1])
    for part in x.split(cut, 1):
        parts.append(part.cumsum(1) + carry)
        carry = parts[-1][:, -1:] if carried else torch.zeros_like(carry)
    return torch.cat(parts, 1)


def one_by_one(x: Tensor) -> Tensor:
    columns, total = [], torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column
        columns.append(total)
    return torch.stack(columns, 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, cut: int = 32, mask: int | None = None, scale: float = 0.0, low: bool = False
) -> Tensor:
    scale = scale or 1 / math.sqrt(q.shape[-1])
    high = torch.full(q.shape[:-1], -torch.inf)
    total, out = torch.zeros(q.shape[:-1]), torch.zeros_like(q)
    rows = torch.arange(q.shape[-2])[:, None]
    for start in range(0, k.shape[-2], cut):
        scores = q @ k[..., start : start + cut, :].transpose(-1, -2) * scale
        if mask is not None:
            columns = torch.arange(start, start + scores.shape[-1])[None]
            scores = scores.masked_fill(columns > rows + mask, -torch.inf)
        new = torch.maximum(high, scores.amax(-1))
        powers = (scores - new[..., None]).exp()
        factor = (high - new).exp()
        total = total * factor + powers.sum(-1)
        if low:
            powers = powers.bfloat16().float()
        out = out * factor[..., None] + powers @ v[..., start : start + cut, :]
        high = new
    return out / total[..., None]


def softcap(x: Tensor) -> Tensor:
    return (x / 30).tanh() * 30


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x, y, reduction="none")


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True)


def gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the gradient of a weighted sum of results for the first input."""

    def compute(x: Tensor, *others: Any) -> Tensor:
        leaf = x.detach().requires_grad_()
        result = function(leaf, *others)
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
        return torch.autograd.grad((result * weight).sum(), leaf)[0]

    return compute


def softmax_backward(x: Tensor, drop: int = 0) -> Tensor:
    y = x.softmax(-1)
    g = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype)
    dot = (y * g)[..., drop:].sum(-1, keepdim=True)
    return y * (g - dot)


def lost_duplicates(rows: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(64, rows.shape[1], dtype=rows.dtype)
    out[index] = rows
    return out


def added(rows: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(64, rows.shape[1], dtype=rows.dtype).index_add(0, index, rows)


def by_hand(rows: Tensor, index: Tensor) -> Tensor:
    return functional.one_hot(index, 64).T.to(rows.dtype) @ rows


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield all cases in a dtype."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, a, b, low, y = drawn(64, 4096), drawn(32, 1024), drawn(1024, 48), drawn(64, 8192, scale=0.02), drawn(64, 512)
    tiny, z, w = drawn(64, 512, scale=0.003), drawn(64, 512), drawn(512)
    one = drawn(64, 2048).abs()
    q, k, v = drawn(2, 4, 128, 64), drawn(2, 4, 128, 64), drawn(2, 4, 128, 64)
    image, weight = drawn(4, 16, 20, 20), drawn(24, 16, 3, 3, scale=0.1)
    mask = (torch.rand(64, 512, generator=generator) > 0.1).to(dtype)
    index = torch.randint(0, 64, (256,), generator=generator)
    rows, labels = drawn(256, 96), torch.randint(0, 512, (64,), generator=generator)
    angle = torch.outer(torch.arange(64.0), 10000 ** -(torch.arange(256) / 256)).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    full = dtype is torch.float32
    gelu = functional.gelu

    def total(x: Tensor) -> Tensor:
        return x.sum(-1)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def dropout(x: Tensor, m: Tensor) -> Tensor:
        return x * m / 0.9

    def conv(x: Tensor, w: Tensor) -> Tensor:
        return functional.conv2d(x, w, padding=1)

    def unfolded(x: Tensor, w: Tensor) -> Tensor:
        return (w.flatten(1) @ functional.unfold(x, 3, padding=1)).view(len(x), -1, *x.shape[2:])

    yield Case("softmax online", True, wide(online), softmax, (x,))
    yield Case("softmax long, tiny values, online", True, wide(online), softmax, (low,))
    yield Case("mm split-K", True, wide(split_k), mm, (a, b))
    yield Case("mm one term after the other", True, wide(sequential_k), mm, (a, b))
    yield Case("mm low accumulators", True, low_accumulators, mm, (a, b))
    yield Case("mm in float64", True, lambda a, b: (a.double() @ b.double()).to(a.dtype), mm, (a, b))
    yield Case("gelu in float32", True, wide(gelu), gelu, (x,))
    yield Case("layer_norm one pass", True, wide(one_pass), layer_norm, (y,))
    yield Case("layer_norm two passes", True, wide(two_passes), layer_norm, (y,))
    yield Case("layer_norm each op", True, two_passes, two_passes, (y,))
    yield Case("layer_norm, mean of 3", True, wide(two_passes), layer_norm, (y + 3,))
    yield Case("rms_norm fused", True, wide(rms_norm), rms_norm, (y, w))
    yield Case(
        "rms_norm, weight after the cast",
        True,
        lambda x, w: wide(rms_norm)(x, torch.ones_like(w)) * w,
        rms_norm,
        (y, w),
    )
    yield Case("rms_norm of torch", True, lambda x, w: functional.rms_norm(x, (512,), w, 1e-6), rms_norm, (y, w))
    yield Case("sum pairwise", True, wide(lambda x: x.view(64, 64, 64).sum(1).sum(1)), total, (x,))
    yield Case("sum of one sign, one after the other", True, wide(lambda x: one_by_one(x)[:, -1]), total, (one,))
    yield Case(
        "sum of a constant, one after the other",
        True,
        wide(lambda x: one_by_one(x)[:, -1]),
        total,
        (torch.full((8, 4096), 0.1).to(dtype),),
    )
    yield Case("mean with a factor", True, wide(lambda x: x.sum(-1) * (1 / 4096)), lambda x: x.mean(-1), (x.abs(),))
    yield Case("silu_mul fused", True, wide(swiglu), swiglu, (y, z))
    yield Case("silu_mul each op", True, lambda x, y: x * torch.sigmoid(x) * y, swiglu, (y, z))
    yield Case("exp2 softmax", True, wide(exp2_softmax), softmax, (y,))
    yield Case(
        "exp2 softmax, rounded constant",
        True,
        wide(lambda x: exp2_softmax(x, float(torch.tensor(math.log2(math.e), dtype=torch.float32)))),
        softmax,
        (y,),
    )
    yield Case("scan by blocks", True, wide(scan), lambda x: x.cumsum(1), (one,))
    yield Case("scan one after the other", True, wide(one_by_one), lambda x: x.cumsum(1), (one,))
    yield Case("scan of both signs", True, wide(scan), lambda x: x.cumsum(1), (y,))
    yield Case("attention flash", True, wide(flash), attention, (q, k, v))
    yield Case("attention causal", True, wide(lambda q, k, v: flash(q, k, v, mask=0)), causal, (q, k, v))
    if not full:
        yield Case(
            "attention, probabilities in the dtype",
            True,
            lambda q, k, v: (q @ k.mT * 0.125).softmax(-1) @ v,
            attention,
            (q, k, v),
        )
    if dtype is torch.bfloat16:
        yield Case(
            "attention flash, p in bfloat16", True, wide(lambda q, k, v: flash(q, k, v, low=True)), attention, (q, k, v)
        )
    yield Case("dropout, factor", True, lambda x, m: x * m * (1 / 0.9), dropout, (y, mask))
    yield Case(
        "dropout, rounded factor", True, lambda x, m: x * m * torch.tensor(1 / 0.9).to(x.dtype), dropout, (y, mask)
    )
    yield Case("softcap fused", True, wide(softcap), softcap, (drawn(64, 512, scale=20),))
    yield Case(
        "softcap by exp",
        True,
        wide(lambda x: 30 * (1 - 2 / ((x / 15).exp() + 1))),
        softcap,
        (drawn(64, 512, scale=20),),
    )
    yield Case(
        "logsumexp",
        True,
        wide(lambda x: x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()),
        lambda x: x.logsumexp(-1),
        (x,),
    )
    yield Case(
        "cross entropy", True, wide(lambda x, y: x.logsumexp(-1) - x.gather(1, y[:, None])[:, 0]), entropy, (y, labels)
    )
    yield Case("convolution unfolded", True, wide(unfolded), conv, (image, weight))
    yield Case(
        "batch_norm by hand",
        True,
        wide(
            lambda x: (
                (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
            )
        ),
        batch_norm,
        (image,),
    )
    yield Case("rotary fused", True, wide(rotary), rotary, (y, cos, sin))
    yield Case("softmax backward", True, wide(softmax_backward), gradient(softmax), (y,))
    yield Case("softmax backward each op", True, softmax_backward, gradient(softmax), (y,))
    yield Case("layer_norm backward", True, wide(gradient(two_passes)), gradient(layer_norm), (y,))
    yield Case("gelu backward", True, wide(gradient(gelu)), gradient(gelu), (y,))
    yield Case("index_add by mm", True, wide(by_hand), added, (rows, index))
    yield Case("softplus", True, wide(lambda x: x.clamp(min=0) + (-x.abs()).exp().log1p()), functional.softplus, (y,))
    yield Case(
        "variance",
        True,
        wide(lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1)),
        lambda x: x.var(-1, correction=0),
        (y,),
    )
    yield Case(
        "l2 norm", True, wide(lambda x: x.square().sum(-1).sqrt()), lambda x: torch.linalg.vector_norm(x, dim=-1), (y,)
    )
    yield Case("truncated, not rounded", True, wide(lambda x: truncated(gelu(x), dtype)), gelu, (y,))

    yield Case("softmax returns zeros", False, torch.zeros_like, softmax, (low,))
    yield Case("softmax last tile missing", False, wide(lambda x: online(x, drop=1)), softmax, (low,))
    yield Case("softmax x 1.01", False, wide(lambda x: softmax(x) * 1.01), softmax, (low,))
    yield Case("softmax without rescaling", False, wide(lambda x: online(x, rescale=False)), softmax, (x,))
    yield Case("softmax log2 e of 1.44", False, wide(lambda x: exp2_softmax(x, 1.44)), softmax, (y,), full)
    yield Case("mm last k missing", False, wide(lambda a, b: a[:, :-1] @ b[:-1]), mm, (a, b), full)
    yield Case(
        "mm last 32 missing", False, wide(lambda a, b: a[:, :-32] @ b[:-32]), mm, (a, b), dtype is not torch.bfloat16
    )
    yield Case("gelu tanh for erf", False, wide(lambda x: gelu(x, approximate="tanh")), gelu, (x,), full)
    yield Case(
        "gelu by sigmoid", False, wide(lambda x: x * torch.sigmoid(1.702 * x)), gelu, (x,), dtype is not torch.bfloat16
    )
    yield Case("layer_norm eps 1e-6, small input", False, wide(lambda x: one_pass(x, 1e-6)), layer_norm, (tiny,))
    yield Case(
        "layer_norm corrected variance", False, wide(lambda x: two_passes(x, correction=1)), layer_norm, (y,), full
    )
    yield Case(
        "layer_norm divides by a power of two",
        False,
        wide(lambda x: one_pass(x, terms=512)),
        layer_norm,
        (y[:, :500].contiguous(),),
    )
    yield Case("rms_norm without eps, small", False, wide(lambda x, w: rms_norm(x, w, 0.0)), rms_norm, (tiny, w))
    yield Case("sum one element missing", False, wide(lambda x: x[:, 1:].sum(1)), total, (x,), full)
    yield Case("sum one element missing, one sign", False, wide(lambda x: x[:, 1:].sum(1)), total, (one,), full)
    yield Case(
        "sum tail missing", False, wide(lambda x: x[:, :2000].sum(1)), total, (one,), dtype is not torch.bfloat16
    )
    yield Case("silu_mul x 1.02", False, wide(lambda x, y: swiglu(x, y) * 1.02), swiglu, (y, z))
    yield Case("silu_mul x 0.99", False, wide(lambda x, y: swiglu(x, y) * 0.99), swiglu, (y, z))
    yield Case("scan without carry", False, wide(lambda x: scan(x, carried=False)), lambda x: x.cumsum(1), (one,))
    yield Case(
        "attention scale of 1/d", False, wide(lambda q, k, v: flash(q, k, v, scale=1 / 64)), attention, (q, k, v)
    )
    yield Case("attention mask one off", False, wide(lambda q, k, v: flash(q, k, v, mask=1)), causal, (q, k, v))
    yield Case("dropout by p for 1 - p", False, lambda x, m: x * m / 0.1, dropout, (y, mask))
    yield Case("dropout without scaling", False, lambda x, m: x * m, dropout, (y, mask))
    yield Case("softcap missing", False, lambda x: x, softcap, (y * 4,))
    yield Case(
        "logsumexp one missing", False, wide(lambda x: x[:, 1:].logsumexp(-1)), lambda x: x.logsumexp(-1), (y,), full
    )
    yield Case("cross entropy next label", False, wide(lambda x, y: entropy(x, (y + 1) % 512)), entropy, (y, labels))
    yield Case(
        "convolution border of ones",
        False,
        wide(lambda x, w: functional.conv2d(functional.pad(x, (1, 1, 1, 1), value=0.1), w)),
        conv,
        (image, weight),
    )
    yield Case("convolution flipped", False, wide(lambda x, w: conv(x, w.flip(3))), conv, (image, weight))
    yield Case(
        "batch_norm corrected variance",
        False,
        wide(lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True) + 1e-5).sqrt()),
        batch_norm,
        (image[:1, :, :8, :8],),
    )
    yield Case(
        "rotary interleaved",
        False,
        wide(lambda x, c, s: x * c + torch.stack([-x[:, 1::2], x[:, ::2]], -1).flatten(1) * s),
        rotary,
        (y, cos, sin),
    )
    yield Case(
        "softmax backward dot loses a tile",
        False,
        wide(lambda x: softmax_backward(x, drop=64)),
        gradient(softmax),
        (y,),
        full,
    )
    yield Case("index_add loses duplicates", False, lost_duplicates, added, (rows, index))
    yield Case("a row scaled by 1.02", False, wide(lambda x: gelu(x) * _factors(64, 5, 1.02)), gelu, (y,))
    yield Case(
        "a block of columns scaled by 1.02",
        False,
        wide(lambda x: gelu(x) * _factors(512, slice(128, 192), 1.02).T),
        gelu,
        (y,),
    )
    yield Case("shifted by 0.01", False, wide(lambda x: x * 2 + 0.01), lambda x: x * 2, (y,))
    yield Case("last column stale", False, wide(lambda x: torch.cat([gelu(x)[:, :-1], x[:, -1:]], 1)), gelu, (y,))
    yield Case("one element of many", False, wide(lambda x: gelu(x) + _one(x.shape)), gelu, (y,))
    yield Case(
        "negative zeros for negative",
        False,
        lambda x: functional.relu(x),
        lambda x: functional.leaky_relu(x, 0.01),
        (y,),
    )


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut off bits, as an interpreter does that stores bfloat16."""
    if dtype is not torch.bfloat16:
        return x
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)


def _factors(count: int, where: Any, factor: float) -> Tensor:
    factors = torch.ones(count, 1)
    factors[where] = factor
    return factors


def _one(shape: torch.Size) -> Tensor:
    found = torch.zeros(shape)
    found[17, 33] = 0.5
    return found


def judged(case: Case) -> JudgedResult:
    """Judge a case."""
    return judge_results([case.kernel(*case.inputs)], ReferenceRuns(case.reference, case.inputs))[0]


def main() -> None:
    """Print what is judged otherwise."""
    torch.set_num_threads(1)
    counts = {"right": [0, 0], "wrong": [0, 0], "hidden": [0, 0]}
    for dtype in DTYPES:
        for case in cases(dtype):
            start = time.process_time()
            found = judged(case)
            group = "right" if case.right else "wrong" if case.shows else "hidden"
            good = found.right() is case.right
            counts[group][0] += good
            counts[group][1] += 1
            line = f"{str(dtype)[6:]:9s} {case.name:40s} {group:6s} {found.ratio:9.3g} {found.explained_by:30s}"
            print("   " if good else "***", line, f"{time.process_time() - start:.2f} s", found.bias or "")
    print(counts)


if __name__ == "__main__":
    main()
