"""Specimens whose kernels differ on a GPU and not on a CPU: atomic additions, ties, and libraries' algorithms.

What each must show follows from torch's documentation of ``torch.use_deterministic_algorithms`` and from public
reports; their notes say whether it was seen on a GPU. On a CPU all of them run, and none differs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


# -------------------------------------------------------------------------------------------------- atomic additions


class CrowdDensity(nn.Module):
    """How much weight of a crowd stands in each cell of a map, by ``scatter_add``."""

    def __init__(self, features: int, cells: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(features, 1)
        self.cells = cells

    def forward(self, people: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        weights = torch.tanh(self.weigh(people)).squeeze(1)
        return weights.new_zeros(self.cells).scatter_add(0, cell, weights)


def crowd_density() -> Example:
    people, cells = 500_000, 500
    return CrowdDensity(4, cells), (torch.randn(people, 4), torch.randint(cells, (people,)))


class VertexNormals(nn.Module):
    """The normals of a mesh's faces, added up at their vertices by ``index_add``."""

    def __init__(self, vertices: int) -> None:
        super().__init__()
        self.turn = nn.Linear(3, 3)
        self.vertices = vertices

    def forward(self, normals: torch.Tensor, vertex: torch.Tensor) -> torch.Tensor:
        turned = torch.tanh(self.turn(normals))
        return turned.new_zeros(self.vertices, 3).index_add(0, vertex, turned)


def vertex_normals() -> Example:
    faces, vertices = 500_000, 500
    return VertexNormals(vertices), (torch.randn(faces, 3), torch.randint(vertices, (faces,)))


class FrequentWords(nn.Module):
    """A tagger of a language of few words: each row of the embedding gets the gradients of thousands of tokens.

    CUDA adds so many by atomic additions, since pytorch#172454.
    """

    def __init__(self, words: int, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, features)
        self.score = nn.Linear(features, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.score(self.embed(tokens)))


def frequent_words() -> Example:
    words = 8
    return FrequentWords(words, 64), (torch.randint(words, (64, 4096)),)


class SuperResolution(nn.Module):
    """Enlarge an image and sharpen it; the backward of the enlarging adds many gradients to each pixel.

    The mode ``nearest`` has a backward that sums up for each pixel by itself.
    """

    def __init__(self, channels: int, *, mode: str) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, channels, 3, padding=1)
        self.mode = mode

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        large = functional.interpolate(self.look(images), scale_factor=8, mode=self.mode)
        return torch.tanh(large)


def super_resolution(*, mode: str) -> Example:
    return SuperResolution(8, mode=mode), (torch.rand(2, 8, 32, 32),)


class SpatialTransformer(nn.Module):
    """Look at a feature map at many points; the backward adds their gradients to the few pixels that they lie between.

    Points that look at the image itself need no gradient for it.
    """

    def __init__(self, channels: int, *, features: bool) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, channels, 3, padding=1)
        self.features = features

    def forward(self, images: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        if self.features:
            return torch.tanh(functional.grid_sample(self.look(images), points, align_corners=False))
        return torch.tanh(self.look(functional.grid_sample(images, points, align_corners=False)))


def spatial_transformer(*, features: bool) -> Example:
    points = torch.rand(2, 128, 128, 2) * 2 - 1
    return SpatialTransformer(4, features=features), (torch.rand(2, 4, 16, 16), points)


# ----------------------------------------------------------------------------------------------------------- ties


class TypicalFrame(nn.Module):
    """For each scene, the frame of median brightness. Brightness is coarse, so that many frames are as bright.

    On CUDA the threads that find one all write its place, and any of them is the last. ``kthvalue`` did the same until
    pytorch#165762, and takes the first since.
    """

    def __init__(self, features: int, *, by_median: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.by_median = by_median

    def forward(self, brightness: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        if self.by_median:
            _, place = brightness.median(dim=1)
        else:
            _, place = brightness.kthvalue((brightness.shape[1] + 1) // 2, dim=1)
        return self.embed(frames[torch.arange(len(place), device=place.device), place])


def typical_frame(*, by_median: bool) -> Example:
    scenes, frames = 256, 4096
    brightness = torch.randint(16, (scenes, frames)) / 4
    return TypicalFrame(4, by_median=by_median), (brightness, torch.randn(scenes, frames, 4))


@torch.library.custom_op("zoo::group_tokens", mutates_args=())
def group_tokens(expert: torch.Tensor, experts: int, *, stable: bool) -> torch.Tensor:
    """The places of tokens sorted by expert; those of one expert in their own order, or as counters hand out slots."""
    if stable or expert.device.type == "cpu":
        return expert.sort(stable=True).indices
    order: torch.Tensor = atomic_slots().order_by_key(expert, experts)
    return order


def atomic_slots() -> Any:
    """The file beside this one, also where a repro runs this file from elsewhere."""
    folder = str(Path(__file__).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("_atomic_slots")


class ExpertSlots(nn.Module):
    """Bring the tokens of each expert together, as a mixture of experts does before it computes."""

    def __init__(self, features: int, experts: int, *, stable: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.experts, self.stable = experts, stable

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)[group_tokens(expert, self.experts, stable=self.stable)]


def expert_slots(*, stable: bool) -> Example:
    tokens, experts = 100_000, 8
    return ExpertSlots(8, experts, stable=stable), (torch.randn(tokens, 8), torch.randint(experts, (tokens,)))


# ------------------------------------------------------------------------------------------------- sparse products


class GraphBatch(nn.Module):
    """Each node of a batch of graphs hears the sum of its neighbours: a sparse matrix of ones times a dense one.

    A few nodes have most of the neighbours, more than one block of threads adds up.
    """

    def __init__(self, features: int, nodes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.nodes = nodes

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(features))
        ones = torch.ones(edges.shape[1], device=edges.device)
        size = (len(features), self.nodes, features.shape[1])
        neighbours = torch.sparse_coo_tensor(edges, ones, size, check_invariants=False).coalesce()
        return torch.bmm(neighbours, hidden)


def graph_batch() -> Example:
    graphs, nodes, neighbours, edges = 2, 16, 20_000, 200_000
    ends = [torch.randint(high, (edges,)) for high in (graphs, nodes, neighbours)]
    return GraphBatch(16, nodes), (torch.randn(graphs, neighbours, 16), torch.stack(ends))


# ------------------------------------------------------------------------------------------------------ attention


def attention_by(*, device: torch.device, plain: bool) -> contextlib.AbstractContextManager[Any]:
    """One implementation of attention; a CPU has no memory-efficient one."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH if plain else SDPBackend.EFFICIENT_ATTENTION)


class LongContext(nn.Module):
    """A few questions are answered from a long text. With so few, memory-efficient attention splits the text among
    blocks of threads, and its backward adds up what each found for a question by atomic additions."""

    def __init__(self, features: int, heads: int, *, plain: bool) -> None:
        super().__init__()
        self.ask, self.read = nn.Linear(features, features), nn.Linear(features, 2 * features)
        self.heads, self.plain = heads, plain

    def split(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, questions: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        keys, values = self.read(text).chunk(2, dim=-1)
        with attention_by(device=text.device, plain=self.plain):
            answers = functional.scaled_dot_product_attention(*map(self.split, (self.ask(questions), keys, values)))
        return torch.tanh(answers)


def long_context(*, plain: bool) -> Example:
    features = 256
    return LongContext(features, 4, plain=plain), (torch.randn(1, 128, features), torch.randn(1, 1024, features))


# --------------------------------------------------------------------------------------------------- convolutions


class TunedConvolution(torch.autograd.Function):
    """A convolution whose backward lets cuDNN try its algorithms out, those that add in any order among them."""

    @staticmethod
    def forward(context: Any, images: torch.Tensor, kernel: torch.Tensor, tuned: bool) -> torch.Tensor:
        context.save_for_backward(images, kernel)
        context.tuned = tuned
        return functional.conv2d(images, kernel, padding=1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, kernel = context.saved_tensors
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=context.tuned, deterministic=not context.tuned, allow_tf32=False
        ):
            _, found, _ = torch.ops.aten.convolution_backward(
                *(gradient.contiguous(), images, kernel, None),
                *([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
                [False, True, False],
            )
        return None, found, None


class TunedEncoder(nn.Module):
    """A convolutional encoder whose author lets cuDNN choose."""

    def __init__(self, channels: int, *, tuned: bool) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(channels, channels, 3, 3) / channels)
        self.tuned = tuned

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(TunedConvolution.apply(images, self.kernel, self.tuned))


def tuned_encoder(*, tuned: bool) -> Example:
    return TunedEncoder(32, tuned=tuned), (torch.randn(16, 32, 56, 56),)


_PRECISION_CHOSEN: list[bool] = []


class QuickProducts(nn.Module):
    """A classifier that switches TF32 on, which its author once read is faster, at the first call or at every call."""

    def __init__(self, features: int, *, once: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Linear(features, 4))
        self.once = once

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not (self.once and _PRECISION_CHOSEN):
            torch.backends.cuda.matmul.allow_tf32 = True
            _PRECISION_CHOSEN.append(True)
        return self.layers(features)


def quick_products(*, once: bool) -> Example:
    return QuickProducts(512, once=once), (torch.randn(64, 512),)


MODELS = {
    "crowd_density": crowd_density,
    "crowd_density_twin": crowd_density,
    "vertex_normals": vertex_normals,
    "vertex_normals_twin": vertex_normals,
    "frequent_words": frequent_words,
    "frequent_words_twin": frequent_words,
    "super_resolution": lambda: super_resolution(mode="bilinear"),
    "super_resolution_twin": lambda: super_resolution(mode="nearest"),
    "spatial_transformer": lambda: spatial_transformer(features=True),
    "spatial_transformer_twin": lambda: spatial_transformer(features=False),
    "typical_frame": lambda: typical_frame(by_median=True),
    "typical_frame_twin": lambda: typical_frame(by_median=False),
    "expert_slots": lambda: expert_slots(stable=False),
    "expert_slots_twin": lambda: expert_slots(stable=True),
    "graph_batch": graph_batch,
    "graph_batch_twin": graph_batch,
    "long_context": lambda: long_context(plain=False),
    "long_context_twin": lambda: long_context(plain=True),
    "tuned_encoder": lambda: tuned_encoder(tuned=True),
    "tuned_encoder_twin": lambda: tuned_encoder(tuned=False),
    "quick_products": lambda: quick_products(once=True),
    "quick_products_twin": lambda: quick_products(once=False),
}
