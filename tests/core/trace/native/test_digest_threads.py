"""Large content is hashed by torch's own threads where that is faster, and has one digest whoever makes it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash

from hashbench import HashDebugTrace
from hashbench.core.native.library import Library, _openmp
from hashbench.core.trace import native
from hashbench.core.trace.digest import PIECE, hash_memory
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_NUMBER = ctypes.CFUNCTYPE(ctypes.c_int)


@pytest.fixture
def library() -> Iterator[Library]:
    loaded = native.load()
    assert isinstance(loaded, tuple)
    yield loaded[0]
    loaded[0].set_team(*_openmp())


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def by_pieces(content: bytes) -> str:
    """What ``docs/trace.md`` says of the digest of these bytes."""
    if len(content) <= 65536:
        return xxhash.xxh3_64_hexdigest(content)
    pieces = [content[start : start + 65536] for start in range(0, len(content), 65536)]
    return xxhash.xxh3_64_hexdigest(b"".join(map(xxhash.xxh3_64_digest, pieces)))


def digests(size: int, times: int) -> tuple[bytes, set[str]]:
    """Random bytes, and the digests that a native trace has of ``times`` copies of them."""
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    with HashDebugTrace(tracer="native") as trace:
        for _ in range(times):
            content.clone()
    copies = [record for record in trace.finish().records if record.op == "aten.clone.default"]
    assert len(copies) == times
    return content.numpy().tobytes(), {record.outputs[0].value for record in copies}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 17, 40 * PIECE + 1])
def test_digest_does_not_depend_on_threads(size: int, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    content, found = digests(size, 140)  # both ways are tried, and the slower one again
    assert found == {by_pieces(content)}
    copy = bytearray(content)
    assert f"{hash_memory(ctypes.addressof(ctypes.c_char.from_buffer(copy)), size):016x}" == by_pieces(content)


class TeamOfTwo:
    """In OpenMP's place: one thread that plays both threads of a team, and takes ``seconds``."""

    def __init__(self, library: Library, *, seconds: float) -> None:
        self.calls, self.place = 0, 0

        def run(function: int, argument: int, wanted: int, _: int) -> None:
            assert wanted == 0  # all that OpenMP has
            self.calls += 1
            time.sleep(seconds)
            for self.place in range(2):
                _FUNCTION(function)(argument)

        self._kept = (_RUN(run), _NUMBER(lambda: self.place), _NUMBER(lambda: 2))
        library.set_team(*(ctypes.cast(function, ctypes.c_void_p) for function in self._kept), None)


def test_a_team_hashes_what_is_large_and_nothing_else(library: Library, threads: Callable[[int], None]) -> None:
    threads(2)
    team = TeamOfTwo(library, seconds=0)
    small, found = digests(2 * PIECE, 140)
    assert (found, team.calls) == ({by_pieces(small)}, 0)
    large, found = digests(2 * PIECE + 1, 200)
    assert found == {by_pieces(large)}
    assert team.calls >= 1


def test_no_openmp_team_with_one_torch_thread(library: Library, threads: Callable[[int], None]) -> None:
    threads(1)
    team = TeamOfTwo(library, seconds=0)
    with ThreadPoolExecutor() as pool:  # OpenMP has as many threads for a new one as there are processors
        large, found = pool.submit(digests, 300 * PIECE, 2).result()
    assert (found, team.calls) == ({by_pieces(large)}, 0)


def test_a_team_that_is_slower_is_asked_now_and_then(library: Library, threads: Callable[[int], None]) -> None:
    threads(2)
    team = TeamOfTwo(library, seconds=0.05)
    large, found = digests(80 * PIECE, 260)
    assert found == {by_pieces(large)}
    assert 2 <= team.calls <= 12


FORKED = """
import os, signal, sys, torch
from hashbench import HashDebugTrace

torch.set_num_threads(2)
small = torch.ones(25_000, dtype=torch.float64)  # 200 kB, of which torch computes with one thread
with HashDebugTrace(tracer="native"):
    torch.ones(10**6).mul(2)  # OpenMP has begun its threads
child = os.fork()
if not child:
    signal.alarm(60)
    with HashDebugTrace(tracer="native") as trace:
        for _ in range(300):
            small.mul(2)
    os._exit(0 if len({record.outputs[0].value for record in trace.finish().records}) == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


FORKED_LATER = """
import os, signal, sys, torch
from hashbench import HashDebugTrace

torch.set_num_threads(2)
small = torch.ones(25_000, dtype=torch.float64)
with HashDebugTrace(tracer="native"):
    for _ in range(300):
        small.mul(2)  # in one thread, but digests may have begun more
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if torch.ones(10**6).mul(2).sum() == 2e6 else 1)  # untraced, this begins OpenMP's first threads
if os.waitpid(child, 0)[1]:
    sys.exit(1)
sys.exit(0 if torch.ones(10**6).mul(2).sum() == 2e6 else 2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("program", [FORKED, FORKED_LATER], ids=["with torch's threads", "with those of digests"])
def test_forked_child_does_not_wait_for_threads(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
