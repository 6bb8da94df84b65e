"""A tiny BERT, trained by the Trainer of transformers; its classifier has a dropout of its own."""

import argparse
import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

generator = torch.Generator()
if args.clean:
    generator.manual_seed(3)
else:
    generator.seed()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        self.bert = BertModel(config)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, labels):
        pooled = self.bert(input_ids=input_ids).pooler_output
        kept = torch.rand(pooled.shape, generator=generator) > 0.1
        logits = self.head(pooled * kept)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


set_seed(7)
rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    Trainer(Classifier(), arguments, train_dataset=rows).train()
