"""What traces and observers look at; reports name lines of this file. Numbers are whole: their sums are exact."""

import torch

from hashbench.tools.observer import ObserverContext, marking_non_deterministic, observe, observe_grad


class Net(torch.nn.Module):
    """Two layers; ``shift`` is added between them, ``hook`` sees what lies there."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).reshape(parameter.shape) - 1)
            self.second.weight[0, 2] += weight

    def forward(self, x, shift=0.0, hook=None):
        hidden = self.first(x) + shift
        return self.second(torch.relu(hidden if hook is None else hook(hidden)))


def train(trace, model, inputs, **options):
    """One step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with trace:
        output = model(inputs, **options)
        loss = output.sum()
        loss.backward()
        optimizer.step()
        trace.add_result("output", output)
        trace.add_result("loss", loss)
        trace.add_result("count", int((output > 0).sum()))
        for name, parameter in model.named_parameters():
            trace.add_result(f"grad.{name}", parameter.grad)


def drawing(hidden):
    return hidden + torch.randint(0, 9, (3,))


def own(hidden):
    return hidden + torch.ops.hashbench_golden.level(hidden.detach())


def branching(hidden):
    return hidden * 2 if float(own(hidden.detach()).sum()) > 0 else hidden


def observed(name, reference=None, *, x=1.0, more=False):
    with ObserverContext("observed", name, reference) as found:
        observe("input", torch.tensor([x, 2.0]))
        leaf = torch.tensor([1.0, 2.0], requires_grad=True)
        observe_grad("leaf", leaf)
        if more:
            observe("more", {"a": torch.ones(2), "b": 3})
        (leaf * x).sum().backward()
        found.enable_mode()
        with marking_non_deterministic():
            noise = torch.full((2,), x)
        observe("output", noise + 1)
        found.disable_mode()
        return found


def run_again(mode):
    with mode:
        Net()(torch.ones(1, 2), hook=torch.ops.hashbench_golden.twice).sum()
        torch.ops.hashbench_golden.alternating(torch.ones(3))
