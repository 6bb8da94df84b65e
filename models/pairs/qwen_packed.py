"""Qwen 2 of transformers on a padded batch; the same sequences packed one behind the other, without padding."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

F = nn.functional

LENGTHS, HEADS, WIDTH = (7, 4, 9), 4, 8
CONFIG = Qwen2Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    vocab_size=71,
    max_position_embeddings=32,
    attn_implementation="eager",
    tie_word_embeddings=True,
)


def make_a():
    return randomised(Qwen2ForCausalLM(CONFIG), 5)


def make_b(fault=""):
    return Packed(make_a(), fault).eval()


def sequences():
    return [tokens(20 + number, 71, length) for number, length in enumerate(LENGTHS)]


def inputs_a():
    ids = nn.utils.rnn.pad_sequence(sequences(), batch_first=True)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}


def inputs_b():
    return (torch.cat(sequences()),)


def outputs_a(result):
    return [result.logits[row, length - 1] for row, length in enumerate(LENGTHS)]


def outputs_b(result):
    return list(result)


class Block(nn.Module):
    def __init__(self, theirs, number, fault):
        super().__init__()
        self.theirs, self.fault = theirs, fault if number == 1 or fault in ("per_sequence", "fused") else ""
        attention = theirs.self_attn
        joined = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = nn.Parameter(torch.cat([p.weight.data for p in joined]).t().contiguous())
        self.bias = nn.Parameter(torch.cat([p.bias.data for p in joined]))
        if self.fault == "stale_bias":
            self.bias.data[40] += 0.05
        if self.fault == "bias_exchanged":
            self.bias.data[32:] = self.bias.data[32:].roll(16)

    def attend(self, q, k, v, owner):
        fault = self.fault
        if fault == "per_sequence":
            parts = zip(*(t.split(LENGTHS, 1) for t in (q, k, v)), strict=True)
            return torch.cat(
                [F.scaled_dot_product_attention(*(t[None] for t in p), is_causal=True)[0] for p in parts], 1
            )
        hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        if fault == "two_joined":
            owner = owner.clamp(max=1)
        if fault != "across":
            hidden = hidden | (owner[:, None] != owner[None, :])
        if fault == "bidirectional":
            hidden = owner[:, None] != owner[None, :]
        if fault == "strict":
            hidden = hidden | (torch.eye(q.shape[1]).bool() & (owner[:, None] > 0) & (owner.roll(1) == owner))
        scores = (q @ k.mT) * (32 if fault == "scale_of_width" else WIDTH) ** -0.5  # fault: scale_of_width
        scores = scores.masked_fill(hidden, float("-inf"))  # fault: across, bidirectional, strict, two_joined
        return scores.softmax(-1) @ v

    def forward(self, x, rotate, owner):
        fault = self.fault
        y = self.theirs.input_layernorm(x)
        qkv = y @ self.weight
        if fault != "bias_missing":
            qkv = qkv + self.bias  # fault: stale_bias, bias_exchanged
        q, k, v = qkv.unflatten(-1, (8, WIDTH)).transpose(0, 1).split([4, 2, 2])
        q, k = rotate(q), rotate(k)  # fault: bias_missing
        k, v = (t[:, None].expand(-1, 2, -1, -1).flatten(0, 1) for t in (k, v))
        o = self.attend(q, k, v, owner).transpose(0, 1).flatten(1)
        x = x + self.theirs.self_attn.o_proj(o)
        y = self.theirs.post_attention_layernorm(x)
        mlp = self.theirs.mlp
        gate, up = mlp.gate_proj(y), mlp.up_proj(y)
        h = torch.tanh(gate) * up if fault == "tanh" else F.silu(gate) * up  # fault: tanh
        return mlp.down_proj(h) + (y if fault == "residual_from_norm" else x)  # fault: residual_from_norm


class Packed(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault = fault
        self.embed, self.norm = theirs.model.embed_tokens, theirs.model.norm
        self.layers = nn.ModuleList(Block(layer, number, fault) for number, layer in enumerate(theirs.model.layers))
        self.register_buffer("inv_freq", theirs.model.rotary_emb.inv_freq.clone(), persistent=False)
        self.head = self.embed.weight
        if fault == "head_untied":
            self.head = nn.Parameter(self.embed.weight.data + 0.01)

    def forward(self, ids):
        lengths = torch.tensor(LENGTHS)
        owner = torch.repeat_interleave(torch.arange(3), lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(ids))
        if self.fault != "running_positions":  # RoPE does not see them
            positions = positions - starts[owner]
        if self.fault == "reversed_positions":
            positions = -positions
        angles = positions[:, None] * self.inv_freq
        cos, sin = (t.repeat(1, 2).to(self.embed.weight.dtype) for t in (angles.cos(), angles.sin()))

        def rotate(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin  # fault: reversed_positions, bias_missing

        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, rotate, owner)
        last = starts + lengths - (2 if self.fault == "last_but_one" else 1)
        x = self.norm(x[last])
        return F.linear(x, self.head)  # fault: head_untied
