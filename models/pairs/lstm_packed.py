"""The LSTM of torch with projections, trained on a loss; one whose four gates are matrices of their own."""

import torch
from _pairs import drawn, randomised
from torch import nn


class Tagger(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.core(x)[0])


def make_a():
    return randomised(Tagger(nn.LSTM(10, 16, num_layers=2, batch_first=True)), 32)


def make_b(fault=""):
    model = make_a()
    model.core = Gates(model.core, fault)
    return model


def inputs():
    return (drawn(33, 4, 7, 10),)


def loss(result):
    return (result.softmax(-1)[..., 0].log() * torch.linspace(-1, 1, 7)).mean()


class Gates(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList()
        for number in range(2):
            layer = nn.ParameterDict()
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                parts = getattr(theirs, f"{kind}_l{number}").data.chunk(4)
                for gate, part in zip("ifgo", parts, strict=True):
                    layer[f"{kind}_{gate}"] = nn.Parameter(part.clone())
            self.layers.append(layer)

    def forward(self, x):
        states = x.unbind(1)
        for number, layer in enumerate(self.layers):
            fault = self.fault if number == 1 else ""
            hidden = cell = x.new_zeros(len(x), 16)
            new = []
            for at in states:
                i, f, g, o = (
                    at @ layer[f"weight_ih_{gate}"].t()
                    + hidden @ layer[f"weight_hh_{gate}"].t()
                    + layer[f"bias_ih_{gate}"]
                    + layer[f"bias_hh_{gate}"]
                    for gate in "ifgo"
                )
                if fault == "gates_exchanged":
                    i, f = f, i
                if fault == "forget_bias":
                    f = f + 1.0  # fault: forget_bias
                g = g.sigmoid() if fault == "sigmoid" else g.tanh()  # fault: sigmoid
                kept = cell.detach() if fault == "truncated" else cell
                if fault == "coupled":
                    cell = f.sigmoid() * kept + (1 - f.sigmoid()) * g  # fault: coupled
                else:
                    cell = f.sigmoid() * kept + i.sigmoid() * g  # fault: gates_exchanged
                if fault == "clipped":
                    cell = cell.clamp(-0.5, 0.5)  # fault: clipped
                hidden = o.sigmoid() * (cell if fault == "tanh_missing" else cell.tanh())  # fault: tanh_missing
                if fault == "peephole":
                    hidden = (o + 0.01 * cell).sigmoid() * cell.tanh()  # fault: peephole
                new.append(hidden)
            if fault == "reversed":
                new.reverse()
            if fault == "late":
                new = [torch.zeros_like(hidden), *new[:-1]]
            states = new
        return torch.stack(states, 1), None
