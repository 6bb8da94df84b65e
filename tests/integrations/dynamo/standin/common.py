"""A small stand-in for the module of the same name in PyTorch's ``benchmarks/dynamo``.

The same class, methods and order of steps, written for these tests. ``STANDIN_YEAR=2024`` makes it one of that year:
another ``run_n_iterations``, which is what gets compiled, and no ``set_stance``. ``STANDIN_CHANGED`` makes it a harness
that has moved on: ``reset`` resets the random state once more, before the run in 64 bits, ``device`` copies a model for
a device, ``keyword`` takes the step by name, ``decorated`` wraps ``check_accuracy``, ``unknown`` compares copies of the
results.
"""

# ruff: noqa: ARG001, ARG002, PTH108, PTH110, PTH118, PTH123 – the signatures and habits of the one it stands for

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
from torch._dynamo.testing import reset_rng_state
from torch._dynamo.utils import clone_inputs, counters, same

OLD = os.environ.get("STANDIN_YEAR") == "2024"
CHANGED = os.environ.get("STANDIN_CHANGED", "")

current_name = current_device = current_batch_size = output_filename = None
current_backend = "eager"


def optimize_ctx(function):
    return torch._dynamo.optimize(current_backend)(function)


def eager_stance():
    return contextlib.nullcontext() if OLD else torch.compiler.set_stance("force_eager")


def decorated(function):
    if CHANGED != "decorated":
        return function
    scope = {"function": function}  # a decorator of another module
    exec("def check_accuracy(*arguments, **named):\n    return function(*arguments, **named)", scope)
    return functools.wraps(function)(scope["check_accuracy"])


class BenchmarkRunner:
    def __init__(self):
        self.model_iter_fn = None
        self.optimizer = None
        self.args = None

    fp32_only_models = frozenset()
    non_deterministic_models = frozenset()
    skip_accuracy_check_as_eager_non_deterministic = frozenset()
    skip_accuracy_checks_large_models_dashboard = frozenset()

    @property
    def equal_nan(self):
        return not self.args.float32

    def pick_grad(self, name, is_training):
        return torch.enable_grad() if is_training else torch.no_grad()

    def init_optimizer(self, name, device, params):
        self.optimizer = None

    def deepcopy_model(self, model):
        return copy.deepcopy(model)

    if CHANGED == "device":

        def deepcopy_and_maybe_parallelize(self, model, device):
            return self.deepcopy_model(model).to(device)

    else:

        def deepcopy_and_maybe_parallelize(self, model):
            return self.deepcopy_model(model)

    def maybe_cast(self, model, example_inputs):
        if current_name in self.fp32_only_models:
            print(f"WARNING: Model {current_name} supports float32 only", file=sys.stderr)
        return model, example_inputs

    def validate_model(self, name, model, example_inputs):
        with self.pick_grad(name, self.args.training):
            try:
                self.model_iter_fn(self.deepcopy_model(model), clone_inputs(example_inputs))
            except Exception as error:
                raise RuntimeError("Eager run failed") from error

    if OLD:

        def run_n_iterations(self, mod, inputs):
            for _ in range(self.args.iterations - 1):
                self.model_iter_fn(mod, inputs, collect_outputs=False)
            return self.model_iter_fn(mod, inputs, collect_outputs=True)

    elif CHANGED == "keyword":

        def run_n_iterations(self, mod, inputs, *, step):
            for _ in range(self.args.iterations - 1):
                step(mod, inputs, collect_outputs=False)
            return step(mod, inputs, collect_outputs=True)

    else:

        def run_n_iterations(self, mod, inputs, model_iter_fn):
            for _ in range(self.args.iterations - 1):
                model_iter_fn(mod, inputs, collect_outputs=False)
            return model_iter_fn(mod, inputs, collect_outputs=True)

    @decorated
    def check_accuracy(self, name, model, example_inputs, optimize_ctx, experiment, tag):
        def record_status(accuracy_status):
            rewritten = ("pass", "eager_two_runs_differ", "fail_accuracy")
            if name in self.non_deterministic_models and accuracy_status in rewritten:
                accuracy_status = "pass"
            write_outputs(accuracy_status, started)
            return accuracy_status

        counters.clear()
        started = time.perf_counter()
        if name in self.skip_accuracy_checks_large_models_dashboard:
            return record_status("pass_due_to_skip")
        with self.pick_grad(name, self.args.training):
            step = () if OLD or CHANGED == "keyword" else (self.model_iter_fn,)
            named = {"step": self.model_iter_fn} if CHANGED == "keyword" else {}
            device = (current_device,) if CHANGED == "device" else ()
            if CHANGED == "reset":
                reset_rng_state()
            with contextlib.suppress(Exception):  # the run in 64 bits: no reset before it
                double = self.deepcopy_and_maybe_parallelize(model, *device).double()
                self.run_n_iterations(double, [tensor.double() for tensor in example_inputs], *step, **named)
            model, example_inputs = self.maybe_cast(model, example_inputs)
            reset_rng_state()
            try:
                with eager_stance():
                    model_copy = self.deepcopy_and_maybe_parallelize(model, *device)
                    self.init_optimizer(name, current_device, model_copy.parameters())
                    correct_result = self.run_n_iterations(model_copy, clone_inputs(example_inputs), *step, **named)
            except Exception:
                return record_status("eager_1st_run_fail")
            reset_rng_state()
            try:
                with eager_stance():
                    model_copy = self.deepcopy_and_maybe_parallelize(model, *device)
                    self.init_optimizer(name, current_device, model_copy.parameters())
                    correct_rerun_result = self.run_n_iterations(
                        model_copy, clone_inputs(example_inputs), *step, **named
                    )
            except Exception:
                return record_status("eager_2nd_run_fail")
            is_same = True
            if CHANGED == "unknown":
                correct_result, correct_rerun_result = copy.deepcopy((correct_result, correct_rerun_result))
            try:
                if name not in self.skip_accuracy_check_as_eager_non_deterministic and not same(
                    correct_result, correct_rerun_result, fp64_ref=None, tol=0, equal_nan=self.equal_nan
                ):
                    is_same = False
            except Exception:
                is_same = False
            if not is_same:
                return record_status("eager_two_runs_differ")
            reset_rng_state()
            torch._dynamo.reset()
            try:
                model_copy = self.deepcopy_and_maybe_parallelize(model, *device)
                if OLD:
                    new_result = optimize_ctx(self.run_n_iterations)(model_copy, example_inputs)
                else:
                    optimized = optimize_ctx(self.model_iter_fn)
                    step, named = ((), {"step": optimized}) if named else ((optimized,), {})
                    new_result = self.run_n_iterations(model_copy, example_inputs, *step, **named)
            except Exception:
                return record_status("fail_to_run")
            if name in self.skip_accuracy_check_as_eager_non_deterministic:
                return record_status("pass_due_to_skip")
            if not same(correct_result, new_result, tol=1e-3, equal_nan=self.equal_nan):
                return record_status("fail_accuracy")
        return record_status("pass")

    def check_batch_invariance(self, name, model, example_inputs, optimize_ctx, experiment, tag):
        """What the one it stands for decides, in our words: halves of the batch beside the whole."""

        def record(status):
            write_outputs(status, started)
            return status

        counters.clear()
        started = time.perf_counter()
        whole, forward = current_batch_size, optimize_ctx(self.forward_pass)
        listed = self.skip_accuracy_checks_large_models_dashboard | self.non_deterministic_models
        with_batch = [tensor for tensor in example_inputs if has_batch(tensor, whole)]
        if name in listed | self.skip_accuracy_check_as_eager_non_deterministic or whole < 2 or not with_batch:
            return record("pass_due_to_skip")

        def outputs_of(size):
            reset_rng_state()
            torch._dynamo.reset()
            model_copy = self.deepcopy_and_maybe_parallelize(model)
            model_copy.eval()
            cloned = clone_inputs(example_inputs)
            cut = [tensor[:size].contiguous() if has_batch(tensor, whole) else tensor for tensor in cloned]
            return self.run_n_iterations(model_copy, cut, forward)

        with self.pick_grad(name, self.args.training):
            model, example_inputs = self.maybe_cast(model, example_inputs)
            try:
                reference = outputs_of(whole)
            except Exception:
                return record("fail_to_run")
            for size in halves(whole):
                try:
                    small = outputs_of(size)
                except Exception:
                    return record(f"fail_to_run_at_batch_{size}")
                expected = reference[:size] if has_batch(reference, whole) else reference
                both = [one if has_batch(one, size) else None for one in (expected, small)]
                if not same(*both, tol=0, equal_nan=self.equal_nan):
                    return record(f"fail_batch_invariance_at_{size}")
        return record("pass")


def has_batch(value, size):
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size


def halves(size):
    return [size >> times for times in range(1, size.bit_length())]


def write_outputs(status, started):
    stats = counters["stats"]
    row = {
        "dev": current_device,
        "name": current_name,
        "batch_size": current_batch_size,
        "accuracy": status,
        "calls_captured": stats["calls_captured"],
        "unique_graphs": stats["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "autograd_captures": counters["aot_autograd"]["total"],
        "autograd_compiles": counters["aot_autograd"]["ok"],
        "compilation_latency": f"{time.perf_counter() - started:.6f}",
    }
    new = not Path(output_filename).exists()
    with open(output_filename, "a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


def parse_args(args=None):
    parser = argparse.ArgumentParser()
    for flag in ("--accuracy", "--training", "--inference", "--float32", "--retain-output", "--batch-invariant"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--filter", "-k", action="append")
    parser.add_argument("--devices", "-d", action="append")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=2000)
    parser.add_argument("--output", required=True)
    return parser.parse_args(args)


def load_model_from_path(path_and_class):
    chosen = dict(part.split(":") for part in path_and_class.split(","))
    spec = importlib.util.spec_from_file_location("module_name", chosen["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = getattr(module, chosen["class"])()
    return type(model).__name__, model, model.get_example_inputs()


def main(runner, original_dir=None, args=None):
    return run(runner, parse_args(args), original_dir)


def check(runner, name, model, inputs):
    method = runner.check_batch_invariance if runner.args.batch_invariant else runner.check_accuracy
    print(method(name, model, inputs, optimize_ctx, None, None))
    stats, breaks = counters["stats"], sum(counters["graph_break"].values())
    graphs, calls = stats["unique_graphs"], stats["calls_captured"]
    print(f"Dynamo produced {graphs} graphs covering {calls} ops with {breaks} graph breaks")


def run(runner, args, original_dir=None):
    global current_name, current_device, current_batch_size, output_filename, current_backend
    runner.args, current_backend = args, args.backend
    output_filename = os.path.join("/", args.output)
    runner.model_iter_fn = runner.forward_and_backward_pass if args.training else runner.forward_pass
    if args.only:
        current_name, current_device, current_batch_size = (
            args.only,
            (args.devices or ["cpu"])[0],
            8 if args.batch_invariant else 2,
        )
        torch.use_deterministic_algorithms(True)
        if ":" in args.only:
            name, model, inputs = load_model_from_path(args.only)
            current_name = name
            check(runner, name, model, inputs)
            return
        try:
            _, name, model, inputs, _ = runner.load_model(current_device, args.only)
        except Exception:
            write_outputs("eager_fail_to_run", time.perf_counter())
            return
        check(runner, name, model, inputs)
        return
    if os.path.exists(output_filename) and not args.retain_output:
        os.unlink(output_filename)
    for name in runner.iter_model_names(args):
        if not any(re.search(pattern, name) for pattern in args.filter or ["."]):
            continue
        try:
            subprocess.check_call([sys.executable, *sys.argv, f"--only={name}"], timeout=args.timeout)
        except subprocess.CalledProcessError as error:
            print("Run failed with return code: ", error.returncode, file=sys.stderr)
