"""Specimens with operators of their own, whose insides a dispatch mode does not see."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


@torch.library.custom_op("zoo::segment_sum", mutates_args=())
def segment_sum(rows: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the rows of each segment, added in any order."""
    return rows.new_zeros(count, rows.shape[1]).index_put_((segments,), rows, accumulate=True)


@torch.library.custom_op("zoo::segment_sum_in_order", mutates_args=())
def segment_sum_in_order(rows: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the rows of each segment, added in their order."""
    return rows.new_zeros(count, rows.shape[1]).index_add_(0, segments, rows)


class SegmentPooling(nn.Module):
    """Pool the points of each object of a scene, then classify the objects."""

    def __init__(self, features: int, objects: int, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.in_order = in_order
        self.classify = nn.Linear(features, 5)
        self.objects = objects

    def forward(self, points: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
        pool = segment_sum_in_order if self.in_order else segment_sum
        return self.classify(pool(self.embed(points), objects, self.objects))


def segment_pooling(*, in_order: bool) -> Example:
    points, objects = 800_000, 1000  # enough for two threads to meet on a busy machine, too
    return SegmentPooling(8, objects, in_order=in_order), (torch.randn(points, 8), torch.randint(objects, (points,)))


@torch.library.custom_op("zoo::fill_bins", mutates_args=())
def fill_bins(values: torch.Tensor, workers: int) -> torch.Tensor:
    """The chunks of ``values`` one behind the other as its workers finish them: the same values in any places."""
    finished: list[np.ndarray] = []

    def work(chunk: np.ndarray) -> None:
        with Path("/dev/urandom").open("rb", buffering=0) as noise:
            time.sleep(noise.read(1)[0] / 256_000)  # as long for all, they finish in one order on some machines
        finished.append(chunk)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, np.array_split(values.numpy(), 64)))
    return torch.from_numpy(np.concatenate(finished) if workers > 1 else values.numpy().copy())


class PointCloudBins(nn.Module):
    """Sort points into bins by several workers, then look at the bins with a convolution."""

    def __init__(self, *, workers: int) -> None:
        super().__init__()
        self.look = nn.Conv1d(1, 4, 5)
        self.workers = workers

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.look(fill_bins(points, self.workers)[None, None])


def point_cloud_bins(*, workers: int) -> Example:
    return PointCloudBins(workers=workers), (torch.randn(4096),)


@torch.library.custom_op("zoo::visit", mutates_args=())
def visit(rows: torch.Tensor, visits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scale ``rows``; on the way, add to ``visits`` in place, which the declaration of this operator denies."""
    visits.index_put_((places,), rows, accumulate=True)
    return rows * 2


@torch.library.custom_op("zoo::visit_in_order", mutates_args=())
def visit_in_order(rows: torch.Tensor, visits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The same undeclared write, added in the order of the rows."""
    visits.index_add_(0, places, rows)
    return rows * 2


class PlaceRecognition(nn.Module):
    """Keep a running description of each visited place beside the description of the current view."""

    def __init__(self, features: int, places: int, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.in_order = in_order
        self.places = places

    def forward(self, views: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(views)
        visits = torch.zeros(self.places, hidden.shape[1])
        scaled = (visit_in_order if self.in_order else visit)(hidden, visits, places)
        return torch.tanh(visits).index_select(0, places) + scaled


def place_recognition(*, in_order: bool) -> Example:
    views, places = 800_000, 1000  # enough for two threads to meet on a busy machine, too
    return PlaceRecognition(8, places, in_order=in_order), (torch.randn(views, 8), torch.randint(places, (views,)))


MODELS = {
    "segment_pooling": lambda: segment_pooling(in_order=False),
    "segment_pooling_twin": lambda: segment_pooling(in_order=True),
    "point_cloud_bins": lambda: point_cloud_bins(workers=8),
    "point_cloud_bins_twin": lambda: point_cloud_bins(workers=1),
    "place_recognition": lambda: place_recognition(in_order=False),
    "place_recognition_twin": lambda: place_recognition(in_order=True),
}
