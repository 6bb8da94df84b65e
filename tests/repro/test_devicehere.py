"""On which device a call is replayed: tables on plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hashbench.replay.call import GeneratorSlot
from hashbench.repro.call_file import Arguments, _Tensors, named_in, substitutes

MOVED = {"cuda:3": "cuda:0"}


@pytest.mark.parametrize(
    ("named", "here", "moved"),
    [
        pytest.param({"cuda:3"}, {"cuda": 1}, MOVED, id="a number that is not here"),
        pytest.param({"cuda:3", "cpu"}, {"cuda": 3}, MOVED, id="beside the host"),
        pytest.param({"cuda:3"}, {"cuda": 4}, {}, id="a number that is here"),
        pytest.param({"cuda:0"}, {"cuda": 1}, {}, id="the first"),
        pytest.param({"cuda"}, {"cuda": 1}, {}, id="no number"),
        pytest.param({"cuda:3"}, {}, {}, id="no accelerator at all"),
        pytest.param({"cuda:3"}, {"xpu": 2}, {}, id="one of another kind"),
        pytest.param({"cuda:0", "cuda:3"}, {"cuda": 1}, {}, id="two that would become one"),
        pytest.param({"cuda:3", "xpu:2"}, {"cuda": 1}, MOVED, id="each kind by itself"),
        pytest.param({"abacus", "cuda:x", ":3"}, {"cuda": 1}, {}, id="no devices"),
    ],
)
def test_which_device_takes_the_place_of_one_that_is_not_here(
    named: set[str], here: Mapping[str, int], moved: Mapping[str, str]
) -> None:
    assert substitutes(named, here) == moved


def test_a_call_names_the_devices_of_all_its_parts() -> None:
    args = [{"generator": 0, "device": "cuda:1"}, [{"device": "cuda:2"}], 3, "cuda:9"]
    memories = [{"bytes": 8, "device": "cpu"}]
    assert named_in([args, {"device": {"device": "meta"}}, memories, None]) == {"cuda:1", "cuda:2", "meta", "cpu"}


def test_arguments_and_random_states_move_with_the_call() -> None:
    arguments = Arguments(tensors=0, generators=1, moved=MOVED)
    assert arguments.decoded({"device": "cuda:3"}) == torch.device("cuda:0")
    assert arguments.decoded({"device": "cuda:1"}) == torch.device("cuda:1")
    assert arguments.decoded({"generator": 0, "device": "cuda:3"}) == GeneratorSlot(0, "cuda:0")
    state = torch.get_rng_state()
    held = _Tensors(Path("tensors.pt"), {"random_states": {"cpu:3": state}}, {"cpu:3": "cpu:0"})
    assert held.random_states() == {"cpu:0": state}
