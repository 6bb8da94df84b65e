"""The sparse block of Qwen 2 MoE of transformers; one that sorts tokens by expert, as grouped kernels need them."""

import torch
from _pairs import drawn, randomised
from torch import nn
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

F = nn.functional

CONFIG = Qwen2MoeConfig(
    hidden_size=32,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=6,
    num_experts_per_tok=2,
    norm_topk_prob=False,
    experts_implementation="eager",
)
CONFIG._experts_implementation = "eager"


class Two(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def make_a():
    return randomised(Two([Qwen2MoeSparseMoeBlock(CONFIG) for _ in range(2)]), 15)


def make_b(fault=""):
    blocks = make_a().blocks
    return Two([Sorted(block, fault if number else "") for number, block in enumerate(blocks)]).eval()


def inputs():
    return (drawn(16, 2, 9, 32),)


def loss(result):
    return result.square().mean()


class Sorted(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault, self.router, self.experts = fault, theirs.gate.weight, theirs.experts
        self.shared, self.shared_gate = theirs.shared_expert, theirs.shared_expert_gate

    def forward(self, hidden):
        fault, x = self.fault, hidden.reshape(-1, 32)
        p = torch.softmax(x @ self.router.t(), -1, dtype=torch.float32)
        weight, chosen = p.topk(2, -1)
        if fault == "renormalised":
            weight = weight / weight.sum(-1, keepdim=True)  # fault: renormalised
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=6).tolist()
        if fault == "capacity":
            counts = [min(count, 5) for count in counts]
        rows = x[order // 2]
        outs, start = [], 0
        for expert, count in enumerate(counts):
            part = rows[start : start + count]
            start += count
            other = (expert + 1) % 6 if fault == "next_expert" and expert == 2 else expert
            gate, up = (part @ self.experts.gate_up_proj[other].t()).chunk(2, -1)  # fault: next_expert, capacity
            outs.append((F.silu(gate) * up) @ self.experts.down_proj[expert].t())
        sorted_out = torch.cat(outs)
        if fault == "capacity":
            sorted_out = F.pad(sorted_out, (0, 0, 0, len(order) - len(sorted_out)))
        back = order if fault == "not_inverted" else order.argsort()
        each = sorted_out[back].view(-1, 2, 32)
        if fault == "weights_detached":
            weight = weight.detach()
        if fault == "one_slot_twice":
            weight = weight[:, :1].expand(-1, 2)
        routed = (each * weight.to(x.dtype)[..., None]).sum(1)  # fault: not_inverted, one_slot_twice
        shared = self.shared(x)
        if fault == "shared_missing":
            return routed.view_as(hidden)
        if fault != "shared_not_gated":
            gate = self.shared_gate(x)
            shared = shared * (gate.tanh() if fault == "shared_tanh" else gate.sigmoid())  # fault: shared_tanh
        return (routed + shared).view_as(hidden)  # fault: shared_not_gated
