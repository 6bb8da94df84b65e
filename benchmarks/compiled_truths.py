"""What the models of the suite ``compiled`` do here: whether each planted fault is one, and each twin and decoy clean.

``python -m benchmarks.compiled_truths`` runs each in a process of its own, without the caches of graphs. ``separation``
is how far compiled is from eager in float64, in units of what eager loses in its own dtype, the largest of all results
and gradients; ``backend`` the first from which on it is above 1e-3; ``own dtype`` the same in the model's own dtype.
``same`` is what torch's ``same()`` says of compiled and eager, with the float64 reference and the
tolerance of ``benchmarks/dynamo``. ``runs`` are those that differ from the first of one compilation, ``compilations``
the results of several processes with other seeds of hashes, and of one thread.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.table import Table
from hashbench.core.errors import last_line
from hashbench.core.records import MODES
from hashbench.core.run.leaves import tensors_of
from hashbench.core.run.workload import Workload, call, clone_inputs, mean_of_outputs
from hashbench.core.suites import registry

SUITE = "compiled"
SEED = 1337
STEPS = 2
"""Of one run: what is stale or moved shows in the second."""
TOLERANCE = {"inference": 1e-4, "training": 1e-3}
CLEAN, PLANTED = 1e-6, 1e-3
"""Bounds of the separation."""
SECONDS = 900.0
"""Time limit of one model."""
UNCACHED = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

LADDER = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
"""Backends, each with more stages of the compiler than the one before."""

Results = dict[str, torch.Tensor]


def load(name: str, mode: str) -> Workload:
    """Build a model of the suite, with its fault planted in this process."""
    torch.manual_seed(SEED)
    spec = next(spec for spec in registry.catalog(SUITE) if spec.name == name)
    return registry.load(spec, mode=mode)


def cast(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return ``value`` in ``dtype`` where it is of floating point and one is asked for."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def run(
    workload: Workload, mode: str, *, backend: str = "", dtype: torch.dtype | None = None, steps: int = STEPS
) -> Results:
    """Run a copy of the model, and return its results, gradients and buffers of every step by name.

    Args:
        workload: from :func:`load`.
        mode: ``training`` (SGD, the mean of the outputs) or ``inference``.
        backend: of ``torch.compile``; empty: eager.
        dtype: into which model and inputs are cast.
        steps: how many.
    """
    model = copy.deepcopy(workload.module).to(dtype=dtype) if dtype is not None else copy.deepcopy(workload.module)
    model.train(mode == "training")
    function = torch.compile(model, backend=backend) if backend else model
    return repeated(model, function, workload, mode, dtype=dtype, steps=steps)


def repeated(
    model: torch.nn.Module, function: Any, workload: Workload, mode: str, *, dtype: torch.dtype | None, steps: int
) -> Results:
    """Run ``function``, which is ``model`` or compiled from it, so many steps."""
    torch.manual_seed(SEED)
    inputs = [cast(value, dtype) for value in clone_inputs(workload.inputs)]
    training = mode == "training"
    results: Results = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if training else None
    for step in range(steps):
        with torch.set_grad_enabled(training):
            output = call(function, inputs)
        for index, tensor in enumerate(tensors_of(output)):
            results[f"{step} output {index}"] = tensor.detach().clone()
        if optimizer is not None:
            optimizer.zero_grad()
            mean_of_outputs(output).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    results[f"{step} gradient {name}"] = parameter.grad.clone()
            optimizer.step()
        results |= {f"{step} buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return results


def separation(reference: Results, exact: Results, compiled: Results) -> tuple[float, str]:
    """Measure compiled against eager.

    Args:
        reference: eager, in the model's own dtype.
        exact: eager in float64.
        compiled: compiled, in float64 or in the model's own dtype.

    Returns:
        The largest distance between ``compiled`` and eager in the same dtype, in units of that between ``reference``
        and ``exact``, or of one rounding in ``reference``'s dtype where that is larger; and the result it was found in.
    """
    worst = 0.0, ""
    for name, right in exact.items():
        if not right.is_floating_point():
            ratio = 0.0 if torch.equal(right, compiled[name]) else float("inf")
        else:
            missing = right.isnan() & compiled[name].isnan()
            near = right if compiled[name].dtype == right.dtype else reference[name]
            apart = (compiled[name].double() - near.double()).masked_fill(missing, 0).abs().max().item()
            lost = (reference[name].double() - right).nan_to_num().abs().max().item()
            rounding = torch.finfo(reference[name].dtype).eps / 2 * right.nan_to_num().abs().max().item()
            ratio = 0.0 if apart == 0 else apart / max(lost, rounding, 1e-300)
        if not ratio <= worst[0]:
            worst = ratio, name
    return worst


def measure(name: str, mode: str, *, runs: int, fallback_random: bool, ladder: bool = True) -> dict[str, Any]:
    """Measure one model in this process, in both dtypes.

    Args:
        name: of the model.
        mode: ``training`` or ``inference``.
        runs: of one compilation, besides the first.
        fallback_random: random numbers as eager draws them.
        ladder: in float64 too, with every backend of ``LADDER`` that it takes.
    """
    from torch._dynamo.utils import same
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    config.fallback_random = fallback_random
    workload = load(name, mode)
    exact, reference = (run(workload, mode, dtype=dtype) for dtype in (torch.float64, None))
    again = run(workload, mode)
    found: dict[str, Any] = {
        "name": name,
        "mode": mode,
        "eager": all(map(torch.equal, reference.values(), again.values())),
    }
    try:
        found["backend"] = ""
        for backend in reversed(LADDER) if ladder else ():
            compiled = run(workload, mode, backend=backend, dtype=torch.float64)
            apart, where = separation(reference, exact, compiled)
            if backend == LADDER[-1]:
                found["separation"], found["where"] = apart, where
            if apart <= PLANTED:
                break
            found["backend"] = backend
        (first, differ), sources = run_and_get_code(lambda: several(workload, mode, runs))
    except Exception as error:  # the row says so
        return {**found, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    calls = re.findall(
        r"^ +(?:\w+ = )?((?:cpp_fused|extern_kernels|torch\.ops)[\w.]*)\(", "\n".join(sources), re.MULTILINE
    )
    found["kernels"] = list(dict.fromkeys(calls))
    found["own"], _ = separation(reference, exact, first)
    found["same"] = all(
        same(reference[key], value, exact[key], tol=TOLERANCE[mode], equal_nan=False) for key, value in first.items()
    )
    return {**found, "differ": differ, "digest": digest(first)}


def several(workload: Workload, mode: str, runs: int) -> tuple[Results, int]:
    """Return the results of the first run of one compilation, and how many of ``runs`` others differ from them."""
    model = copy.deepcopy(workload.module)
    model.train(mode == "training")
    compiled = torch.compile(model, backend="inductor")
    initial = copy.deepcopy(model.state_dict())
    every: list[Results] = []
    for _ in range(runs + 1):
        model.load_state_dict(initial)
        every.append(repeated(model, compiled, workload, mode, dtype=None, steps=STEPS))
    differ = sum(not all(map(torch.equal, every[0].values(), other.values())) for other in every[1:])
    return every[0], differ


def digest(results: Results) -> str:
    """Digest the bits of results (hexadecimal)."""
    whole = hashlib.sha256()
    for value in results.values():
        whole.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def child(name: str, mode: str, *flags: str, threads: int = 2, **environment: str) -> dict[str, Any]:
    """Measure one model in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compiled_truths", "--one", name, mode, *flags]
    variables = {**os.environ, **UNCACHED, "OMP_NUM_THREADS": str(threads), **environment}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"name": name, "mode": mode, "error": f"no answer in {SECONDS:g} s"}
    except (IndexError, ValueError):
        return {"name": name, "mode": mode, "error": last_line(done.stderr)}
    return answer


def lines(wanted: Sequence[str], *, runs: int, compilations: int) -> Iterator[dict[str, Any]]:
    """Measure the models ``wanted`` (none: all), as they come."""
    for spec in registry.catalog(SUITE):
        modes = [mode for mode in reversed(MODES) if not getattr(spec, f"skip_{mode}")]
        if wanted and spec.name not in wanted:
            continue
        mode = "inference" if "inference" in modes else "training"
        line = child(spec.name, mode, "--runs", str(runs), PYTHONHASHSEED="0")
        flags = "--runs", "0", "--own-dtype"
        others = [child(spec.name, mode, *flags, PYTHONHASHSEED=str(seed)) for seed in range(1, compilations)]
        if compilations > 1:
            others.append(child(spec.name, mode, *flags, threads=1, PYTHONHASHSEED="0"))
            line["seeds"] = len({other.get("digest") for other in (line, *others[:-1])})
            line["threads"] = len({other.get("digest") for other in (line, others[-1])})
        yield line


def row(line: dict[str, Any], runs: int) -> tuple[object, ...]:
    """Return the cells of one line."""
    found = f"{line['separation']:.1e}" if "separation" in line else ""
    verdict = {True: "yes", False: "no"}.get(line.get("same", ""), "")
    differ = f"{line['differ']}/{runs}" if "differ" in line else ""
    own = f"{line['own']:.2g}" if "own" in line else ""
    cells = (line["name"], line["mode"], found, line.get("backend", ""), own, verdict, differ)
    others = line.get("seeds", ""), line.get("threads", "")
    return (*cells, *others, line.get("error", "") or line.get("where", ""))


def main() -> None:
    """Print the table, or what one model of it does in this process."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.compiled_truths", description=__doc__
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="models (default: all)")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "MODE"), help="print one model's line as JSON")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of one compilation (default 10)")
    parser.add_argument("--compilations", type=int, default=1, metavar="N", help="processes for each (default 1)")
    parser.add_argument("--own-random", action="store_true", help="without fallback_random, for --one")
    parser.add_argument("--own-dtype", action="store_true", help="not in float64, for --one")
    parsed = parser.parse_args()
    if parsed.one:
        random, ladder = not parsed.own_random, not parsed.own_dtype
        line = measure(*parsed.one, runs=parsed.runs, fallback_random=random, ladder=ladder)
        print(json.dumps(line))
        return
    rows = []
    for line in lines(parsed.only, runs=parsed.runs, compilations=parsed.compilations):
        rows.append(row(line, parsed.runs))
        print(*rows[-1], *line.get("kernels", ()), sep="\t", flush=True)
    headers = ("model", "mode", "separation", "backend", "own dtype", "same", "runs", "seeds", "threads")
    print(Table("Compiled specimens", (*headers, "where, or what was raised"), tuple(rows)).text())


if __name__ == "__main__":
    main()
