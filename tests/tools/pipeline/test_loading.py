"""The parts that are found in a dataset."""

from __future__ import annotations

import random

import numpy as np
import torch

from hashbench.tools.pipeline.loading import dissect


def test_a_global_generator_is_not_also_one_of_the_datasets_own() -> None:
    class Holding:
        def __init__(self) -> None:
            self.normal, self.random, self.torch = np.random.normal, random.random, torch.default_generator
            self.own = np.random.default_rng(3)

    assert list(dissect(Holding()).generators) == ["dataset.own"]
