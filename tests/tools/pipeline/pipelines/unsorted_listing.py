"""Files in the order in which the system lists them."""

import os
from pathlib import Path

from common import Images, load


def broken(_seed, images):
    return load(Images([Path(images, name) for name in os.listdir(images)]))  # noqa: PTH208 – in the system's order


def repaired(_seed, images):
    return load(Images([Path(images, name) for name in sorted(os.listdir(images))]))  # noqa: PTH208 – in the system's order
