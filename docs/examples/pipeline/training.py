"""A small pipeline that repeats: `hashbench pipeline check --config training.py --output-dir check1`."""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

seed = 7
steps = 2


def set_seed(seed):
    """What the training script does first. Leave it out if yours does nothing of the kind."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_loader(seed):
    augment = transforms.Compose(
        [transforms.RandomResizedCrop(12), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    dataset = datasets.ImageFolder(draw_images(), augment)
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, generator=generator)


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(400, 2)
    )


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])


def draw_images(count=12, size=16):
    """A folder with two classes of images. A pipeline of yours has its own."""
    folder = Path(tempfile.gettempdir()) / f"hashbench-example-{count}-{size}"
    pixels = np.random.RandomState(0).randint(0, 256, (count, size, size, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        path = folder / ("light" if number % 2 else "dark") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            Image.fromarray(image).save(path)
    return folder
