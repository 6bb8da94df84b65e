"""Inductor's Triton code for a device that is not there, against eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config
from torch.nn import functional

pytest.importorskip("triton")

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.errors import HashbenchError
from hashbench.core.inductor.internals import CapturedGraphs, wrapper_of
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.workload import Workload
from hashbench.extensions.compiled.as_device import codegen, libdevice
from hashbench.extensions.compiled.as_device.backend import InductorAs, refuse_settings
from hashbench.extensions.compiled.as_device.devices import DEVICES
from hashbench.extensions.compiled.judge import KernelJudge
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.program import compiling, runs_under

pytestmark = pytest.mark.slow

DEVICE = DEVICES["cuda:90"]


def ran(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """What compiled code returns, and the names of its Triton kernels."""
    with compiling(), CapturedGraphs() as hooks:
        result = torch.compile(function, backend=InductorAs(DEVICE))(*args)
        names = [kernel.name for path in hooks.graphs for kernel in wrapper_of(path).kernels]
    assert all(kernel.kind == "triton" for path in hooks.graphs for kernel in wrapper_of(path).kernels)
    return result, names


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.var(-1)


KINDS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "pointwise": (lambda x: functional.gelu(x) * 2 + x.sin(), (37, 5)),
    "persistent reduction": (lambda x: functional.layer_norm(x, (64,)), (32, 64)),
    "looped reduction": (lambda x: x.sum(-1), (4, 9000)),
    "split reduction": (lambda x: x.sum(), (300_000,)),
    "welford": (variance, (4, 9000)),
    "online softmax": (lambda x: x.softmax(-1), (4, 9000)),
    "argmax": (lambda x: x.argmax(-1), (8, 100)),
    "scan": (lambda x: x.cumsum(-1), (4, 256)),
    "scan of pairs": (lambda x: x.logcumsumexp(-1), (4, 64)),
    "sort": (lambda x: x.sort(-1).values, (4, 64)),
    "scatter": (lambda x: torch.zeros(4).index_add(0, torch.arange(64) % 4, x), (64,)),
    "inline assembly": (lambda x: x.atan(), (8, 4)),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), (8, 4)),
    "matmul by ATen": (lambda x: (x @ x.T).relu(), (16, 16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_as_eager_mode(kind: str) -> None:
    function, shape = KINDS[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, names = ran(function, x)
    assert any(name.startswith("triton_") for name in names)
    torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-4)


def test_gradients_and_random_numbers_are_eager_modes() -> None:
    weight = torch.randn(16, 16, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.layer_norm(x @ weight, (16,)), 0.5).square().mean()

    x, found = torch.randn(8, 16), []
    with compiling():
        for step in (torch.compile(loss, backend=InductorAs(DEVICE)), loss):
            torch.manual_seed(3)
            step(x).backward()
            assert weight.grad is not None
            found.append(weight.grad)
            weight.grad = None
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "said"),
    [("cpp_wrapper", "cpp_wrapper"), ("triton.cudagraphs", "CUDA graphs"), ("max_autotune", "max_autotune")],
)
def test_what_cannot_be_interpreted_is_refused(setting: str, said: str) -> None:
    refuse_settings("inductor@cuda:90")
    with torch._inductor.config.patch({setting: True}):
        refuse_settings("inductor")
        with pytest.raises(HashbenchError, match=f"--as cuda:90 cannot be combined with {said}"):
            refuse_settings("inductor@cuda:90")


def test_model_on_a_gpu_is_refused() -> None:
    with pytest.raises(HashbenchError, match="--as cuda:90 cannot be combined with --device cuda:0"):
        refuse_settings("inductor@cuda:90", device="cuda:0")
    refuse_settings("inductor", device="cuda:0")


def test_kernel_that_is_not_interpreted_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen computes its buffer, and the judge does not count it as right."""
    known = {name: function for name, function in libdevice.FUNCTIONS.items() if name != "erf"}
    monkeypatch.setattr(libdevice, "FUNCTIONS", known)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    options = RunOptions(backend="inductor@cuda:90")
    workload = Workload(net, (torch.randn(3, 4),), iterations=1)
    judge = KernelJudge()
    with compiling(), CapturedGraphs() as hooks:
        eager, run = (runs_under(BenchmarkRunner(options), workload, backend=name) for name in (None, options.backend))
        expected, found = eager(traced=False), run(traced=False)
        assert not isinstance(expected, Failure)
        assert not isinstance(found, Failure)
        run(watcher=KernelWatcher(hooks.graphs, judge))
    torch.testing.assert_close(found.results["output.0"], expected.results["output.0"])
    result = judge.result()
    ((name, why),) = result.refused.items()
    assert ("gelu" in name, "libdevice.erf" in why) == (True, True)
    assert result.unchecked == {"kernel not run": 1}
    assert 0 < result.checked < 1
    assert all("gelu" not in buffer.kernel for buffer in result.buffers)


def test_nothing_of_the_device_is_left() -> None:
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from torch.utils._triton import has_triton

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    seen = functools.partial(_seen, triton, AsyncCompile, has_triton)
    before = seen()
    result, _ = ran(lambda x: x.cos() + 1, torch.ones(4))
    assert result.device.type == "cpu"
    assert seen() == before
    assert not torch.cuda.is_available()


def _seen(triton: object, compiler: object, has_triton: Callable[..., bool]) -> tuple[object, ...]:
    return (
        vars(triton.runtime.driver)["_active"],  # type: ignore[attr-defined]
        compiler.triton,  # type: ignore[attr-defined]
        has_triton(),
        torch.cuda.device_count,
        torch.cuda.get_device_properties,
    )


def test_internals_are_there() -> None:
    """All that is replaced: this names what has moved."""
    gone = [f"{holder} {name}" for holder, name, _ in codegen._answers(DEVICE) if not hasattr(holder, name)]
    assert not gone or not torch.backends.cuda.is_built()
