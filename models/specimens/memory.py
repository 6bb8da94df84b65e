"""Specimens that read memory which nobody wrote, two whose unwritten memory reaches no result, and one whose memory was
written without torch's knowledge."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def log_latencies() -> None:
    """Keep a log of how long each step took, and drop it: its blocks go back to the allocator with times in them.

    Blocks of 2 to 100 kB fill holes of any such size, and stay below the size that the C library maps afresh, which
    would come back as zeros.
    """
    log = [np.full(entries, time.perf_counter() % 1, dtype=np.float32) for entries in range(500, 25_000, 250)]
    del log


class PooledWorkspace(nn.Module):
    """Sequences of different lengths copied into one padded workspace; nobody clears the padding."""

    def __init__(self, features: int, *, cleared: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.cleared = cleared

    def workspace(self, steps: int, features: int) -> torch.Tensor:
        return torch.zeros(steps, features) if self.cleared else torch.empty(steps, features)

    def forward(self, *sequences: torch.Tensor) -> torch.Tensor:
        steps = max(len(sequence) for sequence in sequences)
        log_latencies()
        padded = [self.workspace(steps, sequence.shape[1]) for sequence in sequences]
        for target, sequence in zip(padded, sequences, strict=True):
            target[: len(sequence)] = sequence
        return self.project(torch.stack(padded)).mean(dim=1)


def pooled_workspace(*, cleared: bool) -> Example:
    features = 32
    sequences = tuple(torch.randn(steps, features) for steps in (256, 120, 100, 80, 60, 40, 20, 10))
    return PooledWorkspace(features, cleared=cleared), sequences


class OwnArena(nn.Module):
    """Activations in memory that the model manages itself: storages of torch, of which one row is never written."""

    def __init__(self, features: int, *, cleared: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.cleared = cleared

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        log_latencies()
        arena = torch.empty(0).set_(torch.UntypedStorage(rows.nbytes), 0, rows.shape)
        arena[0 if self.cleared else 1 :] = rows[0 if self.cleared else 1 :]
        return self.project(arena)


def own_arena(*, cleared: bool) -> Example:
    return OwnArena(1024, cleared=cleared), (torch.randn(4, 1024),)


class CircularPadding(nn.Module):
    """A panorama padded around its seam; a call that pads one side and crops the other leaves a part unwritten."""

    def __init__(self, padding: tuple[int, int]) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 1)
        self.padding = padding

    def forward(self, panorama: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(panorama)
        log_latencies()
        return nn.functional.pad(mixed, (*self.padding, 0, 0), mode="circular")


def circular_padding(padding: tuple[int, int]) -> Example:
    return CircularPadding(padding), (torch.rand(8, 4, 32, 32),)


class LstmTagger(nn.Module):
    """A part-of-speech tagger: embedding, bidirectional LSTM, one score a tag."""

    def __init__(self, words: int, tags: int, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, features)
        self.lstm = nn.LSTM(features, features, num_layers=2, bidirectional=True, batch_first=True)
        self.score = nn.Linear(2 * features, tags)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        log_latencies()
        states, _ = self.lstm(self.embed(sentences))
        return self.score(states)


def lstm_tagger() -> Example:
    return LstmTagger(words=500, tags=12, features=16), (torch.randint(500, (4, 12)),)


class SpeechRecogniser(nn.Module):
    """Frames to letter probabilities, trained with CTC on transcripts of different lengths."""

    def __init__(self, features: int, letters: int) -> None:
        super().__init__()
        self.letters = nn.Linear(features, letters)

    def forward(self, frames: torch.Tensor, transcripts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = self.letters(frames).log_softmax(dim=-1)
        log_latencies()
        frame_counts = torch.full_like(lengths, len(frames))
        return nn.functional.ctc_loss(scores, transcripts, frame_counts, lengths)


def speech_recogniser() -> Example:
    frames, batch, features, letters = 80, 8, 16, 28
    lengths = torch.arange(1, 1 + batch)
    inputs = torch.randn(frames, batch, features), torch.randint(1, letters, (batch, 3 + batch)), lengths
    return SpeechRecogniser(features, letters), inputs


@torch.library.custom_op("zoo::pack_rows", mutates_args=())
def pack_rows(rows: torch.Tensor, lengths: list[int], *, cleared: bool) -> torch.Tensor:
    """Rows of ragged sequences, one sequence behind the other, as a padded batch; nobody clears the padding."""
    log_latencies()
    shape = (len(lengths), max(lengths), rows.shape[1])
    packed = torch.zeros(shape) if cleared else torch.empty(shape)
    for target, sequence in zip(packed, rows.split(lengths), strict=True):
        target[: len(sequence)] = sequence
    return packed


class RaggedPacking(nn.Module):
    """Classify sequences of different lengths in one batch, which an operator of the model's own packs."""

    def __init__(self, features: int, lengths: list[int], *, cleared: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.classify = nn.Linear(features, 4)
        self.lengths, self.cleared = lengths, cleared

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.classify(pack_rows(self.embed(rows), self.lengths, cleared=self.cleared)).mean(dim=1)


def ragged_packing(*, cleared: bool) -> Example:
    features, lengths = 32, [60, 40, 30, 20, 15, 10, 5, 2]
    return RaggedPacking(features, lengths, cleared=cleared), (torch.randn(sum(lengths), features),)


class SensorFrames(nn.Module):
    """Classify frames that a sensor's driver reads from its device straight into memory that torch allocated."""

    def __init__(self, pixels: int, *, device: str) -> None:
        super().__init__()
        self.classify = nn.Linear(pixels, 4)
        self.pixels, self.device = pixels, device

    def capture(self) -> torch.Tensor:
        frame = torch.empty(self.pixels, dtype=torch.uint8)
        with Path(self.device).open("rb", buffering=0) as device:
            device.readinto(frame.numpy())
        return frame

    def forward(self, exposures: torch.Tensor) -> torch.Tensor:
        return self.classify(exposures[:, None] * self.capture() / 255)


def sensor_frames(*, device: str) -> Example:
    return SensorFrames(256, device=device), (torch.rand(8),)


MODELS = {
    "pooled_workspace": lambda: pooled_workspace(cleared=False),
    "pooled_workspace_twin": lambda: pooled_workspace(cleared=True),
    "own_arena": lambda: own_arena(cleared=False),
    "own_arena_twin": lambda: own_arena(cleared=True),
    "circular_padding": lambda: circular_padding((32, -16)),
    "circular_padding_twin": lambda: circular_padding((16, 16)),
    "lstm_tagger": lstm_tagger,
    "lstm_tagger_twin": lstm_tagger,
    "speech_recogniser": speech_recogniser,
    "speech_recogniser_twin": speech_recogniser,
    "ragged_packing": lambda: ragged_packing(cleared=False),
    "ragged_packing_twin": lambda: ragged_packing(cleared=True),
    "sensor_frames": lambda: sensor_frames(device="/dev/urandom"),
    "sensor_frames_twin": lambda: sensor_frames(device="/dev/zero"),
}
