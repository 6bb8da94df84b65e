"""Which arguments Triton kernels write, as their text says, against what changes when they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo

from hashbench import HashDebugTrace
from hashbench.core.inductor.internals import without_graph_caches
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.generated import GeneratedKernel
from hashbench.extensions.compiled.as_device.backend import InductorAs
from hashbench.extensions.compiled.as_device.devices import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inductor")]
X, Y = torch.linspace(-1, 1, 96).reshape(8, 12), torch.linspace(0, 2, 96).reshape(8, 12)
ROWS = torch.tensor([0, 3, 3, 7])

PROGRAMS: dict[str, Callable[[], object]] = {
    "pointwise": lambda: (X * Y).relu(),
    "updated in place": lambda: (X @ Y.T).relu() + 1,
    "rows": lambda: X.softmax(-1).var(0),
    "a split sum": lambda: torch.linspace(-1, 1, 70_000).mul(2).sum(),
    "a scan": lambda: X.cumsum(1),
    "atomic additions": lambda: torch.zeros(8, 12).index_add(0, ROWS, Y[:4]) * 2,
    "lists": lambda: torch._foreach_add([X, Y[:3]], 1.0),
    "parts of one buffer": lambda: torch.cat([X.sin(), Y.cos()], 1).sum(1),
}


@dataclass
class Written(TraceCallback):
    """Notes which arguments each kernel is said to write, and which it changed."""

    wants_trace = False
    said: list[tuple[str, frozenset[int], frozenset[int]]] = field(default_factory=list)
    before_call: list[Any] = field(default_factory=list)

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
        if isinstance(func, GeneratedKernel):
            self.before_call = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:  # noqa: ARG002
        if isinstance(func, GeneratedKernel):
            tensors = [at for at, each in enumerate(args) if isinstance(each, torch.Tensor)]
            changed = [at for at in tensors if not same(self.before_call[at], args[at])]
            self.said.append((func.plan.name, frozenset(func.plan.written), frozenset(changed)))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    bits, others = (each.reshape(-1).contiguous().view(torch.uint8) for each in (first, second))
    return torch.equal(bits, others)


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_kernel_changes_what_its_text_says_that_it_writes(case: str) -> None:
    pytest.importorskip("triton")
    torch._dynamo.reset()
    seen = Written()
    compiled = torch.compile(PROGRAMS[case], backend=InductorAs(DEVICES["cuda:90"]))
    with without_graph_caches(), torch.no_grad():
        compiled()
        with HashDebugTrace(watcher=seen):
            compiled()
    assert seen.said
    for name, written, changed in seen.said:
        assert name.startswith("triton_")
        assert changed <= written
        assert written
