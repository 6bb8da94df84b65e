"""Specimens of a GPU's memory and of its streams: memory that nobody wrote, and readers that do not wait for writers.

What each must show follows from how streams work; their notes say whether it was seen on a GPU. On a CPU there are no
streams: there everything happens in its own order.
"""

from __future__ import annotations

import time

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

CYCLES_PER_MILLISECOND = 1_500_000
"""Of a GPU's clock, about."""


def keep_waiting(milliseconds: float) -> None:
    """The current stream does nothing for a while; the program goes on."""
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))


def log_latencies(device: torch.device, steps: int, features: int) -> None:
    """Keep a log of how long each step took on the device, and drop it: its blocks go back with times in them."""
    log = [torch.full((steps, features), time.perf_counter() % 1, device=device) for _ in range(10)]
    del log


class ScratchBuffer(nn.Module):
    """Sequences of different lengths copied into one padded buffer on the device; nobody clears the padding."""

    def __init__(self, features: int, *, cleared: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.cleared = cleared

    def buffer(self, steps: int, features: int, device: torch.device) -> torch.Tensor:
        make = torch.zeros if self.cleared else torch.empty
        return make(steps, features, device=device)

    def forward(self, *sequences: torch.Tensor) -> torch.Tensor:
        steps, features, device = max(map(len, sequences)), sequences[0].shape[1], sequences[0].device
        log_latencies(device, steps, features)
        padded = [self.buffer(steps, features, device) for _ in sequences]
        for target, sequence in zip(padded, sequences, strict=True):
            target[: len(sequence)] = sequence
        return self.project(torch.stack(padded)).mean(dim=1)


def scratch_buffer(*, cleared: bool) -> Example:
    features = 64
    sequences = tuple(torch.randn(steps, features) for steps in (256, 120, 80, 40, 20, 10))
    return ScratchBuffer(features, cleared=cleared), sequences


class LatePrefetch(nn.Module):
    """A second stream brings the next rows while the first goes on, which then reads them, finished or not."""

    gate, head_start = 300.0, 0.3
    """Milliseconds: by then the program has queued all work of both streams; after so many more the rows are read."""

    def __init__(self, features: int, *, waits: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.waits = waits

    def prefetched(self, rows: torch.Tensor) -> torch.Tensor:
        target = torch.zeros_like(rows)
        if rows.device.type == "cpu":
            self.bring(rows, target)
            return target
        side, begin = torch.Stream(rows.device), torch.Event(rows.device)
        keep_waiting(self.gate)
        begin.record()
        side.wait_event(begin)
        with side:
            self.bring(rows, target)
        keep_waiting(self.head_start)
        if self.waits:
            self.wait_for(side)
        return target

    @staticmethod
    def bring(rows: torch.Tensor, target: torch.Tensor) -> None:
        for place in range(len(rows)):
            target[place].copy_(rows[place])

    @staticmethod
    def wait_for(side: torch.Stream) -> None:
        torch.accelerator.current_stream(side.device).wait_stream(side)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        target = self.prefetched(hidden.detach())
        found = target + 1.0
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)  # no memory is given back while the other stream uses it
        return found


def late_prefetch(*, waits: bool) -> Example:
    return LatePrefetch(1024, waits=waits), (torch.randn(256, 1024),)


class HostStatistics(nn.Module):
    """Statistics of features, computed on the host from a copy that may still be under way."""

    delay = 10.0
    """Milliseconds in which the device is busy with other things before it begins to copy."""
    looks = 200

    def __init__(self, features: int, *, waits: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.waits = waits

    def copied(self, features: torch.Tensor) -> torch.Tensor:
        on_device = features.device.type != "cpu"
        host = torch.zeros(features.shape, pin_memory=on_device)
        if on_device:
            keep_waiting(self.delay)
        host.copy_(features, non_blocking=True)
        if on_device and self.waits:
            torch.accelerator.synchronize(features.device)
        return host

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(features)
        host = self.copied(hidden.detach())
        average = torch.stack([host.mean(dim=0) for _ in range(self.looks)]).mean(dim=0)
        if hidden.device.type != "cpu":
            torch.accelerator.synchronize(hidden.device)  # the host's memory is not given back while it is written
        return hidden - average.to(hidden.device)


def host_statistics(*, waits: bool) -> Example:
    return HostStatistics(256, waits=waits), (torch.randn(1024, 256),)


MODELS = {
    "scratch_buffer": lambda: scratch_buffer(cleared=False),
    "scratch_buffer_twin": lambda: scratch_buffer(cleared=True),
    "late_prefetch": lambda: late_prefetch(waits=False),
    "late_prefetch_twin": lambda: late_prefetch(waits=True),
    "host_statistics": lambda: host_statistics(waits=False),
    "host_statistics_twin": lambda: host_statistics(waits=True),
}
