"""A suite of the stand-in: a few models, each of which does one thing."""

# ruff: noqa: ARG002 – the signatures of the one it stands for

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import torch
from common import BenchmarkRunner, main
from standin_ops import noisy
from torch._dynamo.testing import collect_results, reduce_to_scalar_loss
from torch._dynamo.utils import clone_inputs
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

CALLS = []


class Steady(torch.nn.Module):
    """Two runs agree."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Noise(torch.nn.Module):
    def forward(self, x):
        return noisy(x)


class Noisy(Steady):
    """An op that draws from a generator that nobody resets."""

    def __init__(self):
        super().__init__()
        self.noise = Noise()

    def forward(self, x):
        return self.noise(super().forward(x))


class Chatty(Noisy):
    """The same, and it prints, and so does the harness when it casts it."""

    def forward(self, x):
        print("forward")
        os.write(2, b"forward\n")
        return super().forward(x)


class Listed(Noisy):
    """The same, and the harness has it in a list of models that may differ."""


class Exempt(Noisy):
    """The same, and the harness does not compare its runs."""


class Huge(Steady):
    """The harness runs it in no accuracy check."""


class Odd(Steady):
    """Returns what the harness cannot compare, and we can."""

    def forward(self, x):
        return super().forward(x), torch.Size([1]), {"a": b"bytes"}


class Stranger(Steady):
    """Returns what nobody can compare."""

    def forward(self, x):
        return super().forward(x), object()


class Signs(Steady):
    """Every other call returns a zero of the other sign."""

    def forward(self, x):
        CALLS.append(1)
        return (x.sum() * 0).abs() * (-1 if len(CALLS) // 2 % 2 else 1)


class NotNumbers(Steady):
    """Returns NaN, in both runs."""

    def forward(self, x):
        return super().forward(x) * float("nan")


class Failing(Steady):
    """Raises in every run."""

    def forward(self, x):
        raise ValueError("no such luck")


class FailingOnce(Steady):
    """An op that raises in the first eager run, and never again."""

    def forward(self, x):
        CALLS.append(x.dtype)
        raises = CALLS.count(torch.float32) == 1
        return super().forward(x).reshape(5 if raises else x.shape[0], -1)


class Shy(Steady):
    """An op that raises in every run that a dispatch mode looks at."""

    def forward(self, x):
        raises = bool(_get_current_dispatch_mode_stack())
        return super().forward(x).reshape(5 if raises else x.shape[0], -1)


class Refused(Steady):
    """An op that torch has no deterministic implementation of."""

    def forward(self, x):
        return super().forward(x).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


class RefusedLater(Refused):
    """The same, and nobody has run it before its accuracy is checked."""


class NoisyStranger(Noisy):
    """Differs, and returns also what nobody can compare."""

    def forward(self, x):
        return super().forward(x), object()


class Alien(Steady):
    """Returns nothing that anybody can compare."""

    def forward(self, x):
        super().forward(x)
        return object()


class NoisyAlien(Noisy):
    """The same, and its ops differ."""

    def forward(self, x):
        super().forward(x)
        return object()


class Centred(Steady):
    """Subtracts the mean of the batch."""

    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(0)


class Doubled(Steady):
    """Computes each item by itself."""

    def forward(self, x):
        return x * 2


class Routed(Steady):
    """Divides more than four items, and multiplies fewer: two ways, each of which rounds otherwise."""

    by = 3

    def forward(self, x):
        return x / self.by if len(x) > 4 else x * (1 / self.by)


class RoutedExactly(Routed):
    """The same by a power of two, which rounds nothing."""

    by = 4


class Entry:
    """Refers to itself, so that only the garbage collector removes it."""

    def __init__(self):
        self.own = self


class Collected(Steady):
    """Scales by how much garbage is still alive."""

    def forward(self, x):
        gc.collect(0)  # from here on the collector does not run by itself before some hundred objects were made
        alive = weakref.WeakSet()
        for _ in range(16):
            alive.add(Entry())
        return super().forward(x) * (1.0 + len(alive))


class Half(Steady):
    """Takes no batch of fewer than three."""

    def forward(self, x):
        if len(x) < 3:
            raise ValueError("too few")
        return x.relu()


class Compiled(torch.nn.Module):
    """What the stand-in's compiler, asked to, gets wrong: its ReLU."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.relu = torch.nn.ReLU()
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.relu(self.first(x)))


class Waiting(Steady):
    """Tells that it runs, and waits to be interrupted."""

    def forward(self, x):
        open(os.environ["READY"], "w").close()  # noqa: PTH123
        time.sleep(300)
        return super().forward(x)


class Dying(Steady):
    """Its process is killed."""


KINDS = [Steady, Noisy, Chatty, Listed, Exempt, Huge, Odd, Stranger, NoisyStranger, Signs, NotNumbers, Failing]
MODELS = {
    kind.__name__.lower(): kind
    for kind in (
        *KINDS,
        FailingOnce,
        Alien,
        NoisyAlien,
        Shy,
        Refused,
        RefusedLater,
        Centred,
        Collected,
        Compiled,
        Doubled,
        Routed,
        RoutedExactly,
        Half,
        Waiting,
        Dying,
    )
}


class ZooRunner(BenchmarkRunner):
    suite_name = "zoo"
    fp32_only_models = frozenset({"chatty", "steady"})
    non_deterministic_models = frozenset({"listed"})
    skip_accuracy_check_as_eager_non_deterministic = frozenset({"exempt"})
    skip_accuracy_checks_large_models_dashboard = frozenset({"huge"})

    def iter_model_names(self, args):
        return sorted(MODELS)

    def load_model(self, device, model_name, batch_size=None, extra_args=None):
        if model_name == "dying":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(1337)
        model, inputs = MODELS[model_name]().to(device), [torch.randn(8 if self.args.batch_invariant else 2, 4)]
        if model_name not in ("failing", "failingonce", "refusedlater", "waiting"):
            self.validate_model(model_name, model, inputs)
        return device, model_name, model, inputs, 2

    def forward_pass(self, mod, inputs, collect_outputs=True):
        return mod(*inputs)

    def forward_and_backward_pass(self, mod, inputs, collect_outputs=True):
        cloned = clone_inputs(inputs)
        mod.zero_grad(True)
        loss = reduce_to_scalar_loss(mod(*cloned))
        loss.backward()
        return collect_results(mod, None, loss, cloned) if collect_outputs else None


if __name__ == "__main__":
    main(ZooRunner())
