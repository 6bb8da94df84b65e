"""BERT of transformers on a padded batch; an encoder of functions with queries, keys and values in one matrix."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import BertConfig, BertModel

F = nn.functional

CONFIG = BertConfig(
    vocab_size=83,
    hidden_size=40,
    num_hidden_layers=3,
    num_attention_heads=5,
    intermediate_size=64,
    max_position_embeddings=24,
    attn_implementation="eager",
)


def make_a():
    return randomised(BertModel(CONFIG), 8)


def make_b(fault=""):
    return Encoder(make_a(), fault).eval()


def inputs():
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    return {
        "input_ids": tokens(9, 83, 2, 10),
        "attention_mask": mask,
        "token_type_ids": tokens(10, 2, 2, 10),
    }


def outputs_a(result):
    return {"hidden": result.last_hidden_state, "pooled": result.pooler_output}


class Layer(nn.Module):
    def __init__(self, theirs, number, fault):
        super().__init__()
        self.fault = fault if number == 1 or fault in ("sdpa", "norm_formula") else ""
        own = theirs.attention.self
        joined = [own.key, own.query, own.value] if self.fault == "qk_exchanged" else [own.query, own.key, own.value]
        self.qkv = nn.Linear(40, 120)
        self.qkv.weight.data = torch.cat([p.weight.data for p in joined])
        self.qkv.bias.data = torch.cat([p.bias.data for p in joined])
        self.proj, self.fc1, self.fc2 = theirs.attention.output.dense, theirs.intermediate.dense, theirs.output.dense
        self.norm1, self.norm2 = theirs.attention.output.LayerNorm, theirs.output.LayerNorm

    def norm(self, x, layer):
        if self.fault == "norm_formula":
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * layer.weight + layer.bias
        return layer(x)

    def forward(self, x, bias):
        fault, (batch, length, _) = self.fault, x.shape
        source = self.norm1(x) if fault == "norm_first" else x
        q, k, v = self.qkv(source).view(batch, length, 3, 5, 8).permute(2, 0, 3, 1, 4)  # fault: norm_first
        if fault == "mask_missing":
            bias = torch.zeros_like(bias)
        if fault == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = (q @ k.mT).div_(40**0.5 if fault == "scale_of_width" else 8**0.5)  # fault: scale_of_width
            scores = scores.add_(
                bias.mT if fault == "mask_transposed" else bias
            )  # fault: mask_missing, mask_transposed
            o = scores.softmax(2 if fault == "softmax_dim" else -1) @ v  # fault: softmax_dim, qk_exchanged
        o = self.proj(o.permute(0, 2, 1, 3).flatten(2))
        if fault == "residual_scaled":
            o = o * 0.5
        x = self.norm(o if fault == "no_residual" else o + x, self.norm1)  # fault: no_residual, residual_scaled
        if fault == "norm_twice":
            x = F.layer_norm(x, (40,), eps=1e-5)  # fault: norm_twice
        h = self.fc1(x)
        h = (
            F.gelu(h, approximate="tanh") if fault == "gelu_tanh" else h * 0.5 * (1 + torch.erf(h / 2**0.5))
        )  # fault: gelu_tanh
        return self.norm(self.fc2(h) + x, self.norm2)


class Encoder(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault, self.embeddings, self.pooler = fault, theirs.embeddings, theirs.pooler
        self.layers = nn.ModuleList(Layer(layer, number, fault) for number, layer in enumerate(theirs.encoder.layer))

    def forward(self, input_ids, attention_mask, token_type_ids):
        fault, e = self.fault, self.embeddings
        start = 2 if fault == "position_offset" else 0
        types = torch.zeros_like(token_type_ids) if fault == "types_missing" else token_type_ids
        x = e.word_embeddings.weight[input_ids] + e.token_type_embeddings.weight[types]  # fault: types_missing
        x = x + e.position_embeddings.weight[start : start + input_ids.shape[1]]  # fault: position_offset
        x = e.LayerNorm(x)
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        bias = bias.expand(-1, -1, input_ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, bias)
        pooled = x.mean(1) if fault == "mean_pooled" else x[:, 0]
        dense = self.pooler.dense(pooled)  # fault: mean_pooled
        return {"hidden": x, "pooled": dense.sigmoid() if fault == "sigmoid" else dense.tanh()}  # fault: sigmoid
