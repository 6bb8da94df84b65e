"""Files taken from a set of names."""

import os
from pathlib import Path

from common import Images, load


def broken(_seed, images):
    return load(Images([Path(images, name) for name in set(os.listdir(images))]))  # noqa: PTH208 – in the system's order


def repaired(_seed, images):
    return load(Images([Path(images, name) for name in sorted(set(os.listdir(images)))]))  # noqa: PTH208 – in the system's order
