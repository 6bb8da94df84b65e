"""Mixtral of transformers, expert by expert; all experts at once on all tokens, with a matrix of gates."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

F = nn.functional

EXPERTS = 4
CONFIG = MixtralConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=67,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    attn_implementation="sdpa",
    experts_implementation="eager",
)


def make_a():
    return randomised(MixtralForCausalLM(CONFIG), 13)


def make_b(fault=""):
    model = make_a()
    for number, layer in enumerate(model.model.layers):
        layer.mlp = Dense(layer.mlp, fault if number == 1 or fault in ("softmax_of_chosen", "loop_of_slots") else "")
    if fault == "gate_of_other_layer":
        model.model.layers[1].mlp.router = model.model.layers[0].mlp.router
    return model


def inputs():
    return {"input_ids": tokens(14, 67, 2, 8), "use_cache": False}


def outputs(result):
    return result.logits


class Dense(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault, self.router = fault, theirs.gate.weight
        self.gate_up, self.down = theirs.experts.gate_up_proj, theirs.experts.down_proj
        gate, up = self.gate_up.data.chunk(2, 1)
        if fault == "gate_up_exchanged":
            self.gate_up = nn.Parameter(torch.cat([up, gate], 1))
        if fault == "experts_exchanged":
            self.down = nn.Parameter(self.down.data[[1, 0, 2, 3]])
        if fault == "expert_stale":
            self.down = nn.Parameter(self.down.data.index_fill(0, torch.tensor([2]), 0.01))

    def forward(self, hidden):
        fault, x = self.fault, hidden.flatten(0, 1)
        logits = F.linear(x, self.router)
        if fault == "router_bias":
            logits = logits + 0.1 * torch.arange(EXPERTS)
        dim = 0 if fault == "softmax_over_tokens" else -1
        p = logits.float().softmax(dim)  # fault: softmax_over_tokens, router_bias
        count = 1 if fault == "top_1" else 2
        if fault == "least":
            weight, chosen = p.topk(count, -1, largest=False)
        else:
            weight, chosen = p.topk(count, -1)  # fault: top_1, least
        if fault == "softmax_of_chosen":
            weight = logits.gather(-1, chosen).float().softmax(-1)
        elif fault == "sigmoid":
            weight = logits.gather(-1, chosen).float().sigmoid()  # fault: sigmoid
            weight = weight / weight.sum(-1, keepdim=True)
        elif fault != "not_renormalised":
            weight = weight / weight.sum(-1, keepdim=True)
        if fault == "weights_flipped":
            weight = weight.flip(-1)
        gates = torch.zeros_like(p).scatter(-1, chosen, weight).to(x.dtype)  # fault: not_renormalised, weights_flipped
        if fault == "weighted_before":
            x = torch.einsum("te,td->etd", gates, x)
            both = x @ self.gate_up.mT
            gates = (gates > 0).to(x.dtype)
        else:
            both = torch.einsum("td,efd->etf", x, self.gate_up)
        gate, up = both.chunk(2, -1)
        h = (
            F.gelu(gate) * up if fault == "gelu" else F.silu(gate) * up
        )  # fault: gelu, gate_up_exchanged, weighted_before
        if fault == "loop_of_slots":
            out = torch.zeros_like(hidden).flatten(0, 1)
            for slot in range(2):
                rows = h[chosen[:, slot], torch.arange(len(out))]
                out += weight[:, slot, None].to(rows.dtype) * (rows[:, None] @ self.down[chosen[:, slot]].mT)[:, 0]
            return out.view_as(hidden)
        each = torch.bmm(h, self.down.mT)  # fault: experts_exchanged, expert_stale
        if fault == "mean_of_experts":
            return each.mean(0).view_as(hidden)  # fault: mean_of_experts
        return torch.einsum("te,etd->td", gates, each).view_as(hidden)
