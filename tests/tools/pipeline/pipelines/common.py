"""What the specimens share: images that a script draws, two datasets of them, and a small model that repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

PLAIN = transforms.ToTensor()


def draw_images(folder: Path, count: int = 10, size: int = 8) -> Path:
    """Two classes, told by the first word of the name."""
    folder.mkdir(parents=True)
    pixels = np.random.RandomState(0).randint(0, 256, (count, size, size, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{('dark', 'light')[number % 2]}_{number:02}.png")
    return folder


class Images(Dataset):
    """Images in the order of ``files``."""

    def __init__(self, files: Sequence[Path | str], transform: Callable[[Any], Any] = PLAIN) -> None:
        self.files, self.augment = list(files), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            picture = image.convert("RGB")
        return self.augment(picture), int("light" in Path(self.files[index]).name)


def sorted_images(folder: str, transform: Callable[[Any], Any] = PLAIN) -> Images:
    return Images(sorted(Path(folder).glob("*.png")), transform)


def load(dataset: Dataset, **arguments: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 4, "num_workers": 2, **arguments})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model() -> torch.nn.Module:
    """Seeded by itself, so that nothing but the fault of a specimen differs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
