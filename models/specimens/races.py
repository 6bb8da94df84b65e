"""Specimens in which two threads write the same element, or one reads what the other writes (origin ``kernel``)."""

from __future__ import annotations

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def slots_for(rows: int, *, shared: bool) -> torch.Tensor:
    """A slot for each of ``rows`` rows: each slot named once, or by one row of either half of the batch.

    Two threads take a half each, in orders that have nothing to do with each other: whatever the delay between the
    threads, there are slots that both are about to write.
    """
    if not shared:
        return torch.randperm(rows)
    return torch.cat((torch.randperm(rows // 2), torch.randperm(rows // 2)))


class SlotWriter(nn.Module):
    """Write rows into their slots by indexing: where a slot is named twice, the last writer wins."""

    def forward(self, memory: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory = memory.clone()
        memory[slots] = rows
        return memory


class SlotMemory(nn.Module):
    """An external memory that keeps the latest encoding written to each slot."""

    def __init__(self, slots: int, features: int) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(slots, features))
        self.encode = nn.Linear(features, features)
        self.write = SlotWriter()

    def forward(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.write(self.memory, slots, torch.tanh(self.encode(rows)))


def slot_memory(*, shared: bool) -> Example:
    rows, features = 2**19, 4
    return SlotMemory(rows, features), (torch.randn(rows, features), slots_for(rows, shared=shared))


class SpeakerBank(nn.Module):
    """The latest voice print of each speaker, kept with ``index_copy``."""

    def __init__(self, speakers: int, features: int) -> None:
        super().__init__()
        self.register_buffer("prints", torch.zeros(speakers, features))
        self.embed = nn.Linear(features, features)

    def forward(self, utterances: torch.Tensor, speakers: torch.Tensor) -> torch.Tensor:
        return self.prints.index_copy(0, speakers, self.embed(utterances)).relu()


def speaker_bank(*, shared: bool) -> Example:
    rows, features = 2**19, 4
    return SpeakerBank(rows, features), (torch.randn(rows, features), slots_for(rows, shared=shared))


class VoxelGrid(nn.Module):
    """A lidar scan drawn into a grid and seen from above; ``put_`` keeps the last point of a cell."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.intensity = nn.Linear(2, 1)
        self.blur = nn.Conv2d(1, 2, 3, padding=1)
        self.side = side

    def forward(self, points: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        grid = points.new_zeros(1, self.side, self.side, self.side)
        grid.put_(cells, self.intensity(points).flatten(), accumulate=False)
        return self.blur(grid.mean(dim=1, keepdim=True))


def voxel_grid(*, shared: bool) -> Example:
    side = 128
    return VoxelGrid(side), (torch.randn(side**3, 2), slots_for(side**3, shared=shared))


class GatedSlots(nn.Module):
    """Slots in which closed gates leave zeros whose sign is that of the gated feature.

    Every row that shares its slot has a closed gate, so the two candidates for a slot are 0.0 and -0.0.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        gated = self.project(rows) * gates
        return torch.ones_like(rows).index_put((slots,), gated)


def gated_slots(*, shared: bool) -> Example:
    rows, features = 2**20, 4
    inputs = torch.randn(rows, features), torch.zeros(rows, 1), slots_for(rows, shared=shared)
    return GatedSlots(features), inputs


class AffinitySmoothing(nn.Module):
    """Make a learned affinity matrix symmetric by adding its own transpose in place.

    The matrix is every second column of a wider one, so torch does not see that source and target overlap.
    """

    def __init__(self, features: int, *, copy_first: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.copy_first = copy_first

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        hidden = self.project(nodes)
        wide = nodes.new_zeros(len(nodes), 2 * len(nodes))
        matrix = wide[:, ::2]
        matrix.copy_(hidden @ nodes.t())
        matrix += matrix.t().clone() if self.copy_first else matrix.t()
        return matrix @ nodes


def affinity_smoothing(*, copy_first: bool) -> Example:
    nodes, features = 1536, 16  # enough for two threads to meet on a busy machine, too
    return AffinitySmoothing(features, copy_first=copy_first), (torch.randn(nodes, features),)


class UnpoolingDecoder(nn.Module):
    """Grow a depth map back to its full size: each depth returns to the pixel that its pooling window took it from.

    Where the windows overlap, one pixel was taken by two of them; ``max_unpool2d`` keeps the depth it wrote last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, depths: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        depths = nn.functional.max_unpool2d(self.scale * depths, pixels, kernel_size=2)
        return nn.functional.avg_pool2d(depths, 8)


def unpooling_decoder(*, shared: bool) -> Example:
    height, width = 1024, 2048
    # Every fourth pixel of the full size, so that the writes are far apart and take both threads long enough to meet.
    pixels = 4 * slots_for(height * width, shared=shared).view(1, 1, height, width)
    return UnpoolingDecoder(), (torch.randn(1, 1, height, width), pixels)


class PhaseReference(nn.Module):
    """Phases of an antenna array against one of its snapshots, computed in place, that snapshot included.

    The signals are every second column of a wider matrix (the others are their quadrature parts), so torch does not see
    that source and target overlap. One thread comes to the reference halfway through its share; from then on the other
    one reads what is left of it. How far that one has come by then is never the same.
    """

    def __init__(self, antennas: int, *, copy_first: bool) -> None:
        super().__init__()
        self.locate = nn.Linear(antennas, 3)
        self.copy_first = copy_first

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        signals = received.clone()[:, ::2]
        chosen = len(signals) // 4
        reference = signals[chosen : chosen + 1]
        signals.atan2_(reference.clone() if self.copy_first else reference)
        return self.locate(signals)


def phase_reference(*, copy_first: bool) -> Example:
    snapshots, antennas = 2**14, 64
    return PhaseReference(antennas, copy_first=copy_first), (torch.randn(snapshots, 2 * antennas),)


MODELS = {
    "slot_memory": lambda: slot_memory(shared=True),
    "slot_memory_twin": lambda: slot_memory(shared=False),
    "speaker_bank": lambda: speaker_bank(shared=True),
    "speaker_bank_twin": lambda: speaker_bank(shared=False),
    "voxel_grid": lambda: voxel_grid(shared=True),
    "voxel_grid_twin": lambda: voxel_grid(shared=False),
    "gated_slots": lambda: gated_slots(shared=True),
    "gated_slots_twin": lambda: gated_slots(shared=False),
    "affinity_smoothing": lambda: affinity_smoothing(copy_first=False),
    "affinity_smoothing_twin": lambda: affinity_smoothing(copy_first=True),
    "unpooling_decoder": lambda: unpooling_decoder(shared=True),
    "unpooling_decoder_twin": lambda: unpooling_decoder(shared=False),
    "phase_reference": lambda: phase_reference(copy_first=False),
    "phase_reference_twin": lambda: phase_reference(copy_first=True),
}
