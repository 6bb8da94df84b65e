"""Ops that several threads dispatch at once, as autograd's threads for several devices do."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench import HashDebugTrace
from hashbench.core.records import Trace

THREADS, ROUNDS = 4, 60


class SameTrace(TorchDispatchMode):
    """Sends the ops of this thread to a trace that another thread entered, as autograd does."""

    def __init__(self, trace: HashDebugTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.trace._tracer.__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def switching_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def traced(**options: Any) -> Trace:
    """Each thread multiplies by a number of its own, again and again, and at times calls an op that fails."""
    trace, start, results = HashDebugTrace(tracer="python", **options), threading.Barrier(THREADS), {}

    def work(number: int) -> None:
        value, leaves = torch.ones(3), [torch.full((3,), 1.0 + number + 10 * count) for count in range(ROUNDS)]
        start.wait()
        with SameTrace(trace):
            for count in range(ROUNDS):
                value = value.mul(1.0 + number)
                leaves[count].neg()
                if count % 20 == 7:
                    with pytest.raises(RuntimeError):
                        torch.ones(2).view(5)
        results[number] = value

    with trace:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == THREADS
    for number, value in sorted(results.items()):
        trace.add_result(f"result.{number}", value)
    return trace.finish()


@pytest.mark.slow
@pytest.mark.usefixtures("switching_all_the_time")
@pytest.mark.parametrize("options", [{}, {"digests": "device"}, {"digests": "device", "hash_inputs": True}], ids=str)
def test_every_record_is_linked_to_the_one_of_its_own_thread(options: dict[str, Any]) -> None:
    trace = traced(**options)
    muls = [record for record in trace.records if "aten.mul." in record.op]
    assert len(muls) == THREADS * ROUNDS
    by_id = {record.id: record for record in trace.records}
    for result in trace.results:
        chain = [by_id[result.source]]
        while chain[-1].inputs[0].source in by_id:
            chain.append(by_id[chain[-1].inputs[0].source])
        assert len(chain) == ROUNDS
        assert len({record.arguments for record in chain}) == 1
        assert chain[0].outputs[0].value == result.digest.value
    digest_of = {leaf.id: leaf.digest.value for leaf in trace.leaves}
    read = {digest_of[one.inputs[0].source]: one.outputs[0].value for one in trace.records if "neg" in one.op}
    assert read == negated(options.get("digests", "fast"))


def negated(digests: str) -> dict[str, str]:
    """The digest of each leaf to that of its negative, by one thread."""
    found = {}
    for number, count in itertools.product(range(THREADS), range(ROUNDS)):
        trace, leaf = HashDebugTrace(digests=digests), torch.full((3,), 1.0 + number + 10 * count)
        trace.add_result("leaf", leaf)
        trace.add_result("negative", -leaf)
        one, other = trace.finish().results
        found[one.digest.value] = other.digest.value
    return found
