"""A model for each way in which a sweep can go without an experiment; numbers are whole, so that sums are exact."""


def _linear():
    import torch

    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.fill_(1.0)
    return model


def steady():
    import torch

    return _linear(), torch.ones(1, 2)


def drifting():
    import torch

    class Drifts(torch.nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.first, self.second = _linear(), _linear()

        def __deepcopy__(self, memo):
            self.runs += 1
            return self

        def forward(self, x):
            return self.second(self.first(x) + self.runs)

    return Drifts(), torch.ones(1, 2)


def does_not_load():
    raise ImportError("No module named 'nothing'")


def does_not_run():
    import torch

    class Fails(torch.nn.Linear):
        def forward(self, x):
            raise ValueError(f"no such width: {x.shape[1]}")

    return Fails(2, 2), torch.ones(1, 3)


def returns_a_generator():
    import torch

    class Lazy(torch.nn.Module):
        def forward(self, x):
            return (one for one in x)

    return Lazy(), torch.ones(2)


MODELS = {
    "steady": steady,
    "drifting": drifting,
    "does_not_load": does_not_load,
    "does_not_run": does_not_run,
    "returns_a_generator": returns_a_generator,
}
