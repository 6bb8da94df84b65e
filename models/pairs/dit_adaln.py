"""A diffusion transformer with adaptive norms; one that modulates in place and packs its images."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2, self.mod = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 192)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.mod(F.silu(c)).unsqueeze(1).chunk(6, -1)
        y = F.layer_norm(x, (32,), eps=1e-6) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        o = (torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.proj(o)
        y = F.layer_norm(x, (32,), eps=1e-6) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(y), approximate="tanh"))


class DiT(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.patch, self.condition = nn.Conv2d(4, 32, 2, stride=2), nn.Embedding(10, 32)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.last = nn.Linear(32, 16)

    def forward(self, x, label):
        c = self.condition(label)
        x = self.patch(x).flatten(2).mT
        for block in self.blocks:
            x = block(x, c)
        return self.last(x).view(2, 4, 4, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(2, 4, 8, 8)


def make_a():
    return randomised(DiT(), 36)


def make_b(fault=""):
    model = Packed()
    model.load_state_dict(make_a().state_dict())
    model.fault = model.blocks[1].fault = fault
    return model.eval()


def inputs():
    return drawn(37, 2, 4, 8, 8), torch.tensor([3, 8])


class PackedBlock(Block):
    fault = ""

    def forward(self, x, c):
        fault = self.fault
        mod = F.linear(
            c if fault == "silu_missing" else F.silu(c), self.mod.weight, self.mod.bias
        )  # fault: silu_missing
        mod = mod.repeat_interleave(16, 0).view(-1, 6, 32)
        order = {"scale_first": (1, 0, 2, 3, 4, 5), "gate_first": (2, 0, 1, 3, 4, 5)}.get(fault, range(6))
        shift1, scale1, gate1, shift2, scale2, gate2 = (mod[:, place] for place in order)
        y = F.layer_norm(x, (32,), eps=1e-5 if fault == "eps" else 1e-6)  # fault: eps
        y.mul_(scale1 if fault == "not_one_plus" else scale1 + 1).add_(
            shift1
        )  # fault: scale_first, gate_first, not_one_plus
        q, k, v = self.qkv(y).view(2, 16, 3, 4, 8).transpose(1, 3).unbind(2)
        if fault == "across_images":
            q, k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v)[0].unflatten(1, (2, 16)).transpose(0, 1)  # fault: across_images
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=fault == "causal")  # fault: causal
        o = self.proj(o.transpose(1, 2).reshape(32, 32))
        gate = gate1.tanh() if fault == "gate_tanh" else gate1  # fault: gate_tanh
        x = x + (o if fault == "gate_missing" else o * gate)  # fault: gate_missing
        source = x
        y = F.layer_norm(source, (32,), eps=1e-6)
        if fault == "modulation_before":
            y = F.layer_norm(source * (scale2 + 1) + shift2, (32,), eps=1e-6)  # fault: modulation_before
        else:
            y = torch.addcmul(y + (0 if fault == "shift_missing" else shift2), y, scale2)  # fault: shift_missing
        h = self.fc1(y)
        h = F.silu(h) if fault == "silu" else F.gelu(h, approximate="tanh")  # fault: silu
        return x.addcmul(self.fc2(h), gate1 if fault == "gate_of_first" else gate2)  # fault: gate_of_first


class Packed(DiT):
    block = PackedBlock
    fault = ""

    def forward(self, x, label):
        fault, c = self.fault, self.condition.weight[label]
        order = (0, 2, 4, 3, 1, 5) if fault == "patch_columns" else (0, 2, 4, 1, 3, 5)
        x = x.view(2, 4, 4, 2, 4, 2).permute(order).reshape(32, 16)
        x = F.linear(x, self.patch.weight.flatten(1), self.patch.bias)  # fault: patch_columns
        for block in self.blocks:
            x = block(x, c)
        y = self.last(x).view(2, 4, 4, 2, 2, 4)
        y = y.permute(0, 5, 1, 4, 2, 3) if fault == "unpatch_columns" else y.permute(0, 5, 1, 3, 2, 4)
        return y.reshape(2, 4, 8, 8)
