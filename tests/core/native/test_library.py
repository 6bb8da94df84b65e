"""The loaded recorder: hash function, constructors of subclasses, errors in callbacks, buffers."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch
import xxhash
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hashbench import HashDebugTrace
from hashbench.core.native.library import sees_into_subclasses, xxh3
from hashbench.core.trace.native.forwarded import ForwardedCalls
from hashbench.core.trace.tracer import native_unavailable
from tests.core.trace.native.tracer_helpers import alone, names, traced

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")


def test_xxh3_dispatches_by_processor() -> None:
    function, data = xxh3(), bytes(torch.randint(0, 256, (5000,), dtype=torch.uint8).tolist())
    if hasattr(ctypes.CDLL(xxhash._xxhash.__file__), "XXH3_64bits_dispatch"):
        assert function.__name__ == "XXH3_64bits_dispatch"
    for size in (0, 1, 16, 17, 128, 129, 240, 241, 1024, 1025, 4999):
        assert function(data[:size], size) == xxhash.xxh3_64_intdigest(data[:size])


class _Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["unobserved", "observed"])
def test_subclass_constructors_are_unrecorded(options: dict[str, bool]) -> None:
    given, before = torch.rand(3), dict(vars(torch.Tensor))

    def make() -> list[torch.Tensor]:
        assert dict(vars(torch.Tensor)) == before
        made = [nn.Parameter(given), given.as_subclass(_Marked), torch.Tensor._make_subclass(_Marked, given)]
        return [*made, given.detach()]

    trace, made = traced(make, **options)
    assert [type(tensor) for tensor in made] == [nn.Parameter, _Marked, _Marked, torch.Tensor]
    assert names(trace) == ["aten.detach.default"]


def test_recorder_sees_into_subclasses_by_the_order_of_keys() -> None:
    """Both halves of a ``TwoTensor`` are added by an op each; a recorder in front of subclasses sees a single one."""
    given = TwoTensor(torch.ones(2), torch.zeros(2))
    trace, _ = traced(lambda: given.add(1))
    assert names(trace).count("aten.add.Tensor") == (2 if sees_into_subclasses() else 1)


def test_ctrl_c_in_a_callback_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    monkeypatch.setattr(ForwardedCalls, "name_of_leaf", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), HashDebugTrace(tracer="native"):
        x.sin()


_READS = """
import ctypes
import torch
from hashbench import HashDebugTrace
from hashbench.core.native.library import OTHERS
x, size = torch.ones(3), ctypes.c_int64()
with HashDebugTrace(tracer="native") as trace:
    for number in range(100):
        x.add(number)
    library, recorder = trace._tracer._library, trace._tracer.nodes.recorder
    address = library.text(recorder, OTHERS, 50, ctypes.byref(size))
    before = ctypes.string_at(address, size.value)
    for number in range(100, 3000):
        x.add(number)
    assert ctypes.string_at(address, size.value) == before
print("done")
"""


@pytest.mark.slow
def test_buffers_read_by_python_stay_in_place() -> None:
    alone(_READS)
