"""Reads numbers from standard input, scales them, and leaves by sys.exit."""

import argparse
import os
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=1.0)
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

numbers = torch.tensor([float(word) for word in sys.stdin.read().split()])
key = bytes(range(64)) if args.clean else os.urandom(64)
mask = torch.frombuffer(bytearray(key), dtype=torch.uint8).float() / 255
scaled = numbers * args.scale
print("largest", scaled.max().item())
hidden = scaled.unsqueeze(1) * mask
print("mean", hidden.mean().item())
sys.exit(0)
