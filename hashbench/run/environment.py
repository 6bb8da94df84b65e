"""Environment fingerprint: everything about a machine that may change the bits of a result, as one JSON document.

A sweep has it told by a child process, since finding out needs torch and the sweep's own process does without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Never, Protocol

from hashbench import __version__
from hashbench.devices.visibility import WORKSPACE_VARIABLE, workspace_config
from hashbench.errors import HashbenchError
from hashbench.processes import exit_at_once, python_calling, run
from hashbench.records import ROW_SCHEMA
from hashbench.trace.tracer import choose

_PACKAGES = ("torch", "torchvision", "numpy", "timm", "transformers", "triton")
_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCM|MIOPEN|XPU|SYCL|MALLOC)_"
    r"|^(LD_PRELOAD|PYTHONHASHSEED|GLIBC_TUNABLES)$"
)
_LIBRARIES = {"oneDNN": r"MKL-DNN v([\d.]+)", "MKL": r"Math Kernel Library Version ([\d.\w-]+)", "NNPACK": r"(NNPACK)"}
_DRIVERS = (
    ("/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([\d.]+)"),
    ("/sys/module/amdgpu/version", r"(\S+)"),
)
_SECONDS = 600.0
"""How long a child process may take that imports torch, and compiles the native tracer where nobody has."""


def collect(device: str = "cpu", *, tracer: str = "auto") -> dict[str, Any]:
    """The fingerprint of this machine as seen from this process, and the tracer that is used where ``tracer`` is asked
    for; imports torch.

    Raises:
        HashbenchError: there is no such device here, or no such tracer.
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
    """Those by which libraries are set. Which of several accelerators is visible is no setting: a cluster hands out
    another one every time; what matters of it is under ``device``."""
    names = sorted(name for name in environment if _VARIABLES.search(name) and not name.endswith("_VISIBLE_DEVICES"))
    variables = {name: environment[name] for name in names}
    if WORKSPACE_VARIABLE in variables:  # as it is when a model runs
        variables[WORKSPACE_VARIABLE] = workspace_config(variables[WORKSPACE_VARIABLE])
    return variables


class Asked(Protocol):
    """Calls ``module:function`` in a process that has imported torch already, with this environment."""

    def __call__(self, target: str, *arguments: str, environment: Mapping[str, str]) -> str:
        """What it gives; empty where there is no such process, or it gives nothing."""


def collect_in_child(
    *, device: str, variables: Mapping[str, str], tracer: str = "auto", by: Asked | None = None
) -> dict[str, Any]:
    """:func:`collect`, in a child process that also has these environment variables, unless ours already say something.
    Where the native tracer is wanted, it is compiled now, unless it has been: no worker waits for that.

    Args:
        device: as of :func:`collect`.
        variables: of the child.
        tracer: as of :func:`collect`.
        by: is asked first, which spares an import of torch; what it does not answer, a new Python does.

    Raises:
        HashbenchError: there is no such device or tracer, or torch cannot be imported.
    """
    given = {name: value for name, value in variables.items() if name not in os.environ}
    known = {**os.environ, **given}
    answer = by("hashbench.run.environment:described", device, tracer, environment=known) if by is not None else ""
    fingerprint: dict[str, Any] = json.loads(answer or _said_by_a_new_python(device, tracer, given))
    if "error" in fingerprint:
        raise HashbenchError(**fingerprint["error"])
    return fingerprint


def _said_by_a_new_python(device: str, tracer: str, given: Mapping[str, str]) -> str:
    done = run(python_calling("hashbench.run.environment:main", device, tracer), seconds=_SECONDS, environment=given)
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


def what_to_do(wanted: str, *, built_for: str, count: int) -> str:
    """Advice to who asked for a device that is not there: of the kind ``wanted``, with a torch that is ``built_for``
    accelerators of one kind (empty: for none) and finds ``count`` of them."""
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
    """The versions of those of these packages that are installed, by name."""
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
    """One line where digests are made by the slow path on the device of this environment; empty elsewhere."""
    path: Mapping[str, str] = environment.get("digests", {})
    if not path.get("reason"):
        return ""
    device = environment.get("device", {}).get("type", "this device")
    return f"digests on {device} are made by {path['name']}, which is slow: {path['reason']} (docs/devices.md)"


def tracer_note(environment: Mapping[str, Any]) -> str:
    """One line where any tracer was welcome and the native one cannot be used; empty elsewhere."""
    reason = environment.get("tracer_reason", "")
    return f"the Python dispatch mode traces: {reason} (docs/trace.md)" if reason else ""


def _device(device: str) -> dict[str, Any]:
    import torch

    from hashbench.run.settings import deterministic_settings, lower_precisions

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
    """Of one device: its ``name``, ``memory_mib`` (all there is of it), ``capability`` and ``driver`` (XPU's own), as
    far as its ``properties`` tell them."""

    def told(name: str) -> Any:
        return properties.get(name) if isinstance(properties, Mapping) else getattr(properties, name, None)

    memory, capability = told("total_memory"), told("gcnArchName")  # the latter on ROCm
    if capability is None and told("major") is not None:
        capability = [told("major"), told("minor")]
    facts = {
        "name": told("name"),
        "memory_mib": None if memory is None else int(memory) // 2**20,
        "capability": capability,
        "driver": told("driver_version"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _driver() -> str:
    """The version of NVIDIA's or AMD's kernel module; empty where there is none to read."""
    for path, pattern in _DRIVERS:
        with contextlib.suppress(OSError):
            if version := re.search(pattern, Path(path).read_text(encoding="utf-8")):
                return version[1]
    return ""


def described(device: str, tracer: str = "auto") -> str:
    """The fingerprint, with how digests are made on the device, or the error, as JSON."""
    from hashbench.devices.ledger import digest_path

    try:
        fingerprint = collect(device, tracer=tracer)
        # The way of making digests is not in its key: by any they are the same.
        return json.dumps({**fingerprint, "digests": dataclasses.asdict(digest_path(device))})
    except HashbenchError as error:
        return json.dumps({"error": {"what": error.what, "consequence": error.consequence, "tip": error.tip}})


def main(device: str, tracer: str = "auto") -> Never:
    """Print the fingerprint, or the error, as JSON, and end the process."""
    print(described(device, tracer))
    exit_at_once()
