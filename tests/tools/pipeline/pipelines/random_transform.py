"""A random transform in a script that seeds nothing."""

from common import load, seeded, sorted_images
from torchvision import transforms

AUGMENT = transforms.Compose([transforms.ColorJitter(0.4, 0.4, 0.4), transforms.ToTensor()])


def broken(_seed, images):
    return load(sorted_images(images, AUGMENT))


def repaired(seed, images):
    return load(sorted_images(images, AUGMENT), generator=seeded(seed))
