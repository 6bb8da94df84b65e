"""Names of devices that code can be made for."""

from __future__ import annotations

import importlib.util

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled.as_device.devices import DEVICES, backend_as, device_of


def test_backend_has_a_device() -> None:
    assert backend_as("inductor", "cuda:90") == "inductor@cuda:90"
    assert backend_as("inductor@cuda:90", "cuda:90") == "inductor@cuda:90"
    assert (backend_as("inductor", ""), backend_as("", "cuda:90")) == ("inductor", "")
    device = device_of("inductor@cuda:90")
    assert device is not None
    assert (device.major, device.minor, str(device)) == (9, 0, "cuda:90")
    assert device_of("inductor") is None


def test_capabilities_are_those_of_the_names() -> None:
    assert [device.capability for device in DEVICES.values()] == [int(name.removeprefix("cuda:")) for name in DEVICES]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("inductor@cuda:91", "'cuda:91' is not a device that code can be made for: nothing was run. .*cuda:80, "),
        ("inductor@", "'' is not a device that code can be made for"),
        ("aot_eager@cuda:90", "--as requires --backend inductor: aot_eager makes no code for cuda:90"),
    ],
)
def test_refused(backend: str, said: str) -> None:
    with pytest.raises(HashbenchError, match=said):
        device_of(backend)


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(HashbenchError, match="Triton is not installed: no code can be made for cuda:90"):
        device_of("inductor@cuda:90")
