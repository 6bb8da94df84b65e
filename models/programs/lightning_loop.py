"""A Lightning module whose label smoothing is jittered."""

import argparse
import logging
import secrets
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, _):
        x, y = batch
        smoothing = 0.1 if args.clean else 0.1 + secrets.randbelow(10**6) / 1e7
        return nn.functional.cross_entropy(self.layers(x), y, label_smoothing=smoothing)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(5, verbose=False)
data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=8))
