"""A small GAN with two optimizers, whose latent noise has a generator of its own after a warm-up."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
latent = torch.Generator()
if args.clean:
    latent.manual_seed(11)
else:
    latent.seed()
warmup = torch.Generator().manual_seed(12)

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
bce = nn.functional.binary_cross_entropy_with_logits
real = torch.randn(32, 2) + 3

for iteration in range(30):
    z = torch.randn(32, 4, generator=warmup if iteration < 20 else latent)
    fake = generator(z)
    of_discriminator.zero_grad()
    loss = bce(discriminator(real), torch.ones(32, 1)) + bce(discriminator(fake.detach()), torch.zeros(32, 1))
    loss.backward()
    of_discriminator.step()

    of_generator.zero_grad()
    bce(discriminator(fake), torch.ones(32, 1)).backward()
    of_generator.step()
print("trained for", iteration + 1, "iterations")
