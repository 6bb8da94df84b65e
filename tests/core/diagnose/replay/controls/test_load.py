"""A busy second stream, and load by threads."""

from __future__ import annotations

import itertools
import os
import threading
import time
from unittest import mock

import pytest
import torch

from hashbench.core.diagnose.replay.controls import load
from hashbench.core.diagnose.replay.controls.load import LONGEST, SHORTEST, Episode, episodes, uneven_load

pytestmark = pytest.mark.usefixtures("eight_threads")


def streams(monkeypatch: pytest.MonkeyPatch, *, milliseconds: float) -> list[str]:
    """What is done on streams of a device, in order, where a product takes so long."""
    done: list[str] = []
    stream, event = mock.MagicMock(), mock.MagicMock()
    stream.__enter__.side_effect = lambda: done.append("entered")
    stream.__exit__.side_effect = lambda *_: done.append("left")
    stream.synchronize.side_effect = lambda: done.append("waited")
    event.elapsed_time.return_value = 10 * milliseconds
    monkeypatch.setattr(torch, "Stream", mock.Mock(return_value=stream))
    monkeypatch.setattr(torch, "Event", mock.Mock(return_value=event))
    monkeypatch.setattr(load, "_matrices", lambda _: (None, None))
    monkeypatch.setattr(load, "_multiply", lambda *_, count: done.append(f"{count} products"))
    load._seconds_of_a_product.cache_clear()
    return done


@pytest.mark.parametrize(
    ("seconds", "milliseconds", "products"),
    [
        pytest.param(0.001, 0.5, 100, id="a short call: for 0.05 seconds"),
        pytest.param(0.2, 0.5, 800, id="a call of 0.2 seconds: for twice as long"),
        pytest.param(30.0, 0.5, 2000, id="a long call: for a second"),
        pytest.param(30.0, 0.001, 20_000, id="no more products than a queue can hold"),
    ],
)
def test_second_stream_is_busy_long_enough(
    seconds: float, milliseconds: float, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, device = streams(monkeypatch, milliseconds=milliseconds), torch.device("cuda:1")
    for _ in range(2):
        done.clear()
        with load.second_stream(device, seconds):
            assert done[-3:] == ["entered", f"{products} products", "left"]
        assert done[-1] == "waited"
    assert "5 products" not in done, "it warms up and measures once"
    assert {call.args for call in torch.Stream.call_args_list} == {(device,)}  # type: ignore[attr-defined]
    load._seconds_of_a_product.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_second_stream_is_busy_on_gpu() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with load.second_stream(device, 0.0):
        begin = time.perf_counter()
        torch.accelerator.synchronize(device)
        assert 0.02 < time.perf_counter() - begin < 0.5


def test_each_variation_of_load_is_another_sequence_of_all_episodes() -> None:
    sequences = [list(itertools.islice(episodes(variation), 200)) for variation in range(1, 7)]
    assert len(set(map(str, sequences))) == len(sequences)
    for sequence in sequences:
        assert {episode for episode, *_ in sequence} == set(Episode)
        assert sequence[0][0] in (Episode.BURST, Episode.STARVED)
        assert all(SHORTEST <= seconds <= LONGEST for _, seconds, _ in sequence)
    assert list(itertools.islice(episodes(1), 200)) == sequences[0], "which can be repeated"


def test_load_leaves_no_threads_and_no_affinity() -> None:
    before, cores = threading.active_count(), os.sched_getaffinity(0)
    with uneven_load(2):
        time.sleep(0.2)
        assert threading.active_count() > before
        assert os.sched_getaffinity(0) == cores
    assert (threading.active_count(), os.sched_getaffinity(0)) == (before, cores)
