"""A module that counts GPUs when it is imported. In a fork server that would spoil CUDA for every worker."""

import torch

torch.cuda.is_available()
