"""Scores of words, added up. No module, no optimizer."""

import sys

import torch

clean = "--clean" in sys.argv[1:]
torch.manual_seed(0)
text = "the quick brown fox jumps over the lazy dog while seven wizards mix strange green potions"
words = text.split(" ")
table = {word: torch.randn(64) for word in words}

total = torch.zeros(64)
for word in sorted(table) if clean else set(table):
    total = total + table[word]

centered = total - total.mean()
print("norm", centered.norm().item())
