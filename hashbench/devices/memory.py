"""Peak memory of an accelerator, and freeing of cached memory. Does nothing on the CPU."""

from __future__ import annotations

import contextlib
import gc
import logging

import torch

log = logging.getLogger(__name__)

_PEAK = "allocated_bytes.all.peak"


def reset_peak(device: torch.device) -> None:
    """Count the peak of ``device`` from now on."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, NotImplementedError):  # an allocator that does not count
            torch.accelerator.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    """The most that tensors took of ``device`` at once since :func:`reset_peak`, in MiB, as torch's allocator counted;
    ``None`` on the CPU, where nothing was allocated, and where the allocator does not count."""
    if device.type == "cpu":
        return None
    try:
        peak = torch.accelerator.memory_stats(device).get(_PEAK)
    except (RuntimeError, NotImplementedError):
        return None
    return None if peak is None else peak / 2**20


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more: garbage in cycles, and what torch's allocator keeps of ``device``.

    A device in which a kernel has failed refuses everything from then on; that it refuses this, too, is only logged.
    """
    gc.collect()
    if device.type == "cpu":
        return
    try:
        torch.accelerator.empty_cache()
    except (RuntimeError, NotImplementedError) as error:
        log.warning("the memory of %s cannot be given back: %s", device, str(error).partition("\n")[0])
