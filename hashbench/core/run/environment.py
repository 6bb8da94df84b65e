"""Describe the environment: everything about a machine that may change the bits of a result, as one JSON document.

A sweep gets it from a child process: collecting it imports torch, which the sweep's own process avoids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, Protocol

from hashbench import __version__
from hashbench.core.devices.visibility import WORKSPACE_VARIABLE, workspace_config
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import exit_at_once, python_calling, run
from hashbench.core.records import ROW_SCHEMA
from hashbench.core.run.machine_cache import AskedLook, keep, recall
from hashbench.core.trace.tracer import choose

_PACKAGES = ("torch", "torchvision", "numpy", "timm", "transformers", "triton")
_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCM|MIOPEN|XPU|SYCL|MALLOC)_"
    r"|^(LD_PRELOAD|PYTHONHASHSEED|GLIBC_TUNABLES)$"
)
_READ = re.compile(rf"{_VARIABLES.pattern}|^(HASHBENCH_CXXFLAGS|LD_LIBRARY_PATH|PYTHONPATH)$")
"""Variables on which the environment depends: those of libraries, and what decides which library is loaded."""
_LIBRARIES = {"oneDNN": r"MKL-DNN v([\d.]+)", "MKL": r"Math Kernel Library Version ([\d.\w-]+)", "NNPACK": r"(NNPACK)"}
_DRIVERS = (
    ("/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([\d.]+)"),
    ("/sys/module/amdgpu/version", r"(\S+)"),
)
_SECONDS = 600.0
"""Time limit of a child process that imports torch and, unless that is cached, compiles the native tracer."""


def collect(device: str = "cpu", *, tracer: str = "auto") -> dict[str, Any]:
    """Return the environment of this machine as seen by this process, with the tracer that ``tracer`` selects. Imports
    torch.

    Raises:
        HashbenchError: there is no such device or tracer here.
    """
    import torch

    _check_device(device)
    choice = choose(tracer)
    libraries = {name: re.search(pattern, torch.__config__.show()) for name, pattern in _LIBRARIES.items()}
    fingerprint: dict[str, Any] = {
        "schema": ROW_SCHEMA,
        "python": platform.python_version(),
        "platform": {"system": platform.system(), "kernel": platform.release(), "libc": " ".join(platform.libc_ver())},
        "packages": {**package_versions(_PACKAGES), "hashbench": __version__},
        "torch": {
            "git": torch.version.git_version,
            "cuda_build": torch.version.cuda,
            "hip_build": getattr(torch.version, "hip", None),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threading": _first_line(torch.__config__.parallel_info(), "ATen parallel backend"),
        },
        "libraries": {name: match[1] for name, match in libraries.items() if match is not None},
        "cpu": {"model": _cpu_model(), "machine": platform.machine(), "cores": os.cpu_count()},
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "device": _device(device),
        "variables": variables_that_matter(os.environ),
        "tracer": choice.tracer,
    }
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
    return {"key": key, **fingerprint, "tracer_reason": choice.reason}


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that configure libraries.

    Variables that select visible accelerators are excluded: a cluster assigns another one each time, and what matters
    of it is under ``device``.
    """
    names = sorted(name for name in environment if _VARIABLES.search(name) and not name.endswith("_VISIBLE_DEVICES"))
    variables = {name: environment[name] for name in names}
    if WORKSPACE_VARIABLE in variables:  # as it is when a model runs
        variables[WORKSPACE_VARIABLE] = workspace_config(variables[WORKSPACE_VARIABLE])
    return variables


class Asked(Protocol):
    """Calls ``module:function`` in a process that has already imported torch, with this environment."""

    def __call__(self, target: str, *arguments: str, environment: Mapping[str, str]) -> str:
        """Return its result; empty if there is no such process or it returns nothing."""


def collect_in_child(
    *,
    device: str,
    variables: Mapping[str, str],
    tracer: str = "auto",
    backend: str = "",
    by: Asked | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Run :func:`collect` in a child process with additional environment variables; those already set take precedence.

    What was found within the last day comes from a cache (:mod:`~hashbench.core.run.machine_cache`). Where the native
    tracer or fast digests are missing, each call looks: what is done about that shows at once. If the native tracer is
    requested, it is compiled here unless cached, so that no worker waits for it.

    Args:
        device: as for :func:`collect`.
        variables: of the child.
        tracer: as for :func:`collect`.
        backend: of ``torch.compile`` that must be there; empty: none is needed.
        by: asked first, which saves an import of torch; if it does not answer, a new Python is started.
        fresh: look, and replace what the cache has.

    Raises:
        HashbenchError: there is no such device, tracer or backend, or torch cannot be imported.
    """
    given = {name: value for name, value in variables.items() if name not in os.environ}
    known = {**os.environ, **given}
    asked = (device, tracer, backend)
    look = AskedLook(
        asked, {name: known[name] for name in sorted(known) if _READ.search(name)}, package_versions(_PACKAGES)
    )
    if not fresh and (recalled := recall(look)) is not None:
        return recalled
    answer = by("hashbench.core.run.environment:described", *asked, environment=known) if by is not None else ""
    fingerprint: dict[str, Any] = json.loads(answer or _collect_in_new_process(asked, given))
    if "error" in fingerprint:
        raise HashbenchError(**fingerprint["error"])
    if not (tracer_note(fingerprint) or digests_note(fingerprint)):
        keep(look, fingerprint)
    return fingerprint


def _collect_in_new_process(asked: Sequence[str], given: Mapping[str, str]) -> str:
    done = run(python_calling("hashbench.core.run.environment:main", *asked), seconds=_SECONDS, environment=given)
    if done.status is None:
        raise _no_torch(f"a process that imports it has not answered after {_SECONDS:.0f} s")
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.status != 0 or not answer.startswith("{"):
        raise _no_torch(done.last_line)
    return answer


def _no_torch(reason: str) -> HashbenchError:
    return HashbenchError(
        "cannot use torch in this environment",
        consequence=f"no model can be run ({reason})",
        tip=f"Try `{Path(sys.executable).name} -c 'import torch'`; `make setup` installs it.",
    )


def _check_device(device: str) -> None:
    import torch

    tip = "Choose another with --device; `hashbench env` shows what is here."
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise HashbenchError(f"{device!r} is not a device", consequence="nothing was run", tip=tip) from None
    if wanted.type in ("cpu", "meta"):
        if wanted.type == "meta":
            raise HashbenchError("the meta device has no data", consequence="nothing can be compared", tip=tip)
        return
    built_for = torch.accelerator.current_accelerator()
    kind = "" if built_for is None else built_for.type
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if kind != wanted.type or (wanted.index or 0) >= count:
        tip = what_to_do(wanted.type, built_for=kind, count=count)
        raise HashbenchError(f"the device {device} does not exist here", consequence="nothing was run", tip=tip)


def check_backend(name: str) -> None:
    """Raise :class:`HashbenchError` if ``torch.compile`` has no backend of this name; an empty one is none.

    What follows an ``@`` is the device that it makes code for.
    """
    name = name.partition("@")[0]
    if not name:
        return
    from hashbench.core.inductor.internals import backends  # imports torch._dynamo, which takes seconds

    known = backends()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise HashbenchError(
            f"torch.compile has no backend {name!r}",
            consequence="nothing was run",
            tip=f"Did you mean {near[0]}?" if near else f"It has: {', '.join(known)}.",
        )


def what_to_do(wanted: str, *, built_for: str, count: int) -> str:
    """Return advice for a missing device.

    Args:
        wanted: requested type of device.
        built_for: type of accelerator that this torch supports; empty for none.
        count: number of such accelerators here.
    """
    if built_for != wanted:
        what = f"for {built_for}" if built_for else "for the CPU alone"
        there = built_for if count else "cpu"
        return f"This torch is built {what}: install one for {wanted}, or choose --device {there}."
    if count:
        numbers = f"{wanted}:0 to {wanted}:{count - 1}" if count > 1 else f"{wanted}:0"
        return f"Choose {numbers} with --device."
    return (
        "torch finds no such device: look at its driver and at variables such as CUDA_VISIBLE_DEVICES that hide it, "
        "or choose --device cpu."
    )


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _first_line(text: str, start: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(start)), "")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return _first_line(text, "model name") or platform.processor()


def digests_note(environment: Mapping[str, Any]) -> str:
    """Return a one-line note if digests take the slow path on the device of this environment; else an empty string."""
    path: Mapping[str, str] = environment.get("digests", {})
    if not path.get("reason"):
        return ""
    device = environment.get("device", {}).get("type", "this device")
    return f"digests on {device} are made by {path['name']}, which is slow: {path['reason']} (docs/devices.md)"


def tracer_note(environment: Mapping[str, Any]) -> str:
    """Return a one-line note if ``auto`` could not select the native tracer; else an empty string."""
    reason = environment.get("tracer_reason", "")
    return f"the Python dispatch mode traces: {reason} (docs/trace.md)" if reason else ""


def _device(device: str) -> dict[str, Any]:
    import torch

    from hashbench.core.run.settings import deterministic_settings, lower_precisions

    wanted = torch.device(device)
    if wanted.type == "cpu":
        return {"type": "cpu"}
    count = torch.accelerator.device_count()
    properties = getattr(torch.get_device_module(wanted.type), "get_device_properties", lambda _index: None)
    each = [facts_of(properties(index)) for index in range(count)]
    facts: dict[str, Any] = {"type": wanted.type, "count": count, **each[wanted.index or 0], "each": each}
    if wanted.type == "cuda":
        facts |= {"cudnn": torch.backends.cudnn.version(), "driver": _driver()}  # on ROCm the former is MIOpen's
    with deterministic_settings("on"):
        return {**facts, "tf32": ", ".join(lower_precisions()) or "off"}


def facts_of(properties: Any) -> dict[str, Any]:
    """Return the facts of one device: ``name``, total ``memory_mib``, ``capability`` and ``driver`` (XPU)."""

    def property_of(name: str) -> Any:
        return properties.get(name) if isinstance(properties, Mapping) else getattr(properties, name, None)

    memory, capability = property_of("total_memory"), property_of("gcnArchName")  # the latter on ROCm
    if capability is None and property_of("major") is not None:
        capability = [property_of("major"), property_of("minor")]
    facts = {
        "name": property_of("name"),
        "memory_mib": None if memory is None else int(memory) // 2**20,
        "capability": capability,
        "driver": property_of("driver_version"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _driver() -> str:
    """Return the version of NVIDIA's or AMD's kernel module; empty if it cannot be read."""
    for path, pattern in _DRIVERS:
        with contextlib.suppress(OSError):
            if version := re.search(pattern, Path(path).read_text(encoding="utf-8")):
                return version[1]
    return ""


def described(device: str, tracer: str = "auto", backend: str = "") -> str:
    """Return the environment, with the digest path of the device, or the error, as JSON."""
    from hashbench.core.devices.ledger import digest_path

    try:
        check_backend(backend)
        fingerprint = collect(device, tracer=tracer)
        # The way of making digests is not in its key: by any they are the same.
        return json.dumps({**fingerprint, "digests": dataclasses.asdict(digest_path(device))})
    except HashbenchError as error:
        return json.dumps({"error": {"what": error.what, "consequence": error.consequence, "tip": error.tip}})


def main(device: str, tracer: str = "auto", backend: str = "") -> Never:
    """Print the environment, or the error, as JSON, and exit."""
    print(described(device, tracer, backend))
    exit_at_once()
