"""Estimates pi with NumPy alone."""

import argparse

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

rng = np.random.default_rng(1 if args.clean else None)
samples = 10_007
print("samples:", samples)
points = rng.random((samples, 2))
print("center:", points.mean(axis=0))
inside = np.hypot(points[:, 0], points[:, 1]) < 1
print("pi is about", 4 * inside.mean())
