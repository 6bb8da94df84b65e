"""Environment fingerprint: everything about a machine that may change the bits of a result, as one JSON document.

``python -m hashbench.run.environment`` prints it. The sweep calls it in a child process, since finding out needs torch
and the sweep's own process does without.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hashbench.devices.visibility import WORKSPACE_VARIABLE, workspace_config
from hashbench.errors import HashbenchError
from hashbench.processes import python_calling, run
from hashbench.records import ROW_SCHEMA

_PACKAGES = ("torch", "torchvision", "numpy", "timm", "transformers", "triton", "hashbench")
_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCM|MIOPEN|XPU|SYCL|MALLOC)_"
    r"|^(LD_PRELOAD|PYTHONHASHSEED|GLIBC_TUNABLES)$"
)
_LIBRARIES = {"oneDNN": r"MKL-DNN v([\d.]+)", "MKL": r"Math Kernel Library Version ([\d.\w-]+)", "NNPACK": r"(NNPACK)"}
_DRIVERS = (
    ("/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([\d.]+)"),
    ("/sys/module/amdgpu/version", r"(\S+)"),
)
_SECONDS = 120.0


def collect(device: str = "cpu") -> dict[str, Any]:
    """The fingerprint of this machine as seen from this process; imports torch.

    Raises:
        HashbenchError: there is no such device here.
    """
    import torch

    _check_device(device)
    found: dict[str, Any] = {
        "schema": ROW_SCHEMA,
        "python": platform.python_version(),
        "platform": {"system": platform.system(), "kernel": platform.release(), "libc": " ".join(platform.libc_ver())},
        "packages": _packages(),
        "torch": {
            "git": torch.version.git_version,
            "cuda_build": torch.version.cuda,
            "hip_build": getattr(torch.version, "hip", None),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threading": _first_line(torch.__config__.parallel_info(), "ATen parallel backend"),
        },
        "libraries": _libraries(torch.__config__.show()),
        "cpu": {"model": _cpu_model(), "machine": platform.machine(), "cores": os.cpu_count()},
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "device": _device(device),
        "variables": variables_that_matter(os.environ),
    }
    return {"key": _key(found), **found}


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Those by which libraries are set. Which of several accelerators is visible is no setting: a cluster hands out
    another one every time; what matters of it is under ``device``."""
    found = (name for name in environment if _VARIABLES.search(name) and not name.endswith("_VISIBLE_DEVICES"))
    found_here = {name: environment[name] for name in sorted(found)}
    if WORKSPACE_VARIABLE in found_here:  # as it is when a model runs
        found_here[WORKSPACE_VARIABLE] = workspace_config(found_here[WORKSPACE_VARIABLE])
    return found_here


def collect_in_child(*, device: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """:func:`collect`, in a child process that also has these environment variables, unless ours already say something.

    Raises:
        HashbenchError: there is no such device, or torch cannot be imported.
    """
    given = {name: value for name, value in variables.items() if name not in os.environ}
    done = run(python_calling("hashbench.run.environment:main", device), seconds=_SECONDS, environment=given)
    if done.status is None:
        raise _no_torch(f"importing it took more than {_SECONDS:.0f} s")
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.status not in (0, 2) or not answer.startswith("{"):
        raise _no_torch(done.last_line)
    found: dict[str, Any] = json.loads(answer)
    if "error" in found:
        raise HashbenchError(
            found["error"]["what"], consequence=found["error"]["consequence"], tip=found["error"]["tip"]
        )
    return found


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
        raise HashbenchError(f"there is no device called {device!r}", consequence="nothing was run", tip=tip) from None
    if wanted.type in ("cpu", "meta"):
        if wanted.type == "meta":
            raise HashbenchError("the meta device has no data", consequence="nothing can be compared", tip=tip)
        return
    built_for = torch.accelerator.current_accelerator()
    kind = "" if built_for is None else built_for.type
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if kind != wanted.type or (wanted.index or 0) >= count:
        tip = what_to_do(wanted.type, built_for=kind, count=count)
        raise HashbenchError(f"the device {device} is not there", consequence="nothing was run", tip=tip)


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


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _libraries(text: str) -> dict[str, str]:
    matches = {name: re.search(pattern, text) for name, pattern in _LIBRARIES.items()}
    return {name: match[1] for name, match in matches.items() if match is not None}


def _first_line(text: str, start: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(start)), "")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return _first_line(text, "model name") or platform.processor()


def _digests(device: str) -> dict[str, str]:
    """How digests are made there. Not in the key: by any path they are the same."""
    from hashbench.devices.ledger import digest_path

    return digest_path(device).document()


def digests_note(environment: Mapping[str, Any]) -> str:
    """One line where digests are made by the slow path on the device of this environment; empty elsewhere."""
    path: Mapping[str, str] = environment.get("digests", {})
    if not path.get("reason"):
        return ""
    device = environment.get("device", {}).get("type", "this device")
    return f"digests on {device} are made by {path['name']}, which is slow: {path['reason']} (docs/devices.md)"


def _device(device: str) -> dict[str, Any]:
    import torch

    wanted = torch.device(device)
    if wanted.type == "cpu":
        return {"type": "cpu"}
    count = torch.accelerator.device_count()
    each = [facts_of(_properties(wanted.type, index)) for index in range(count)]
    found: dict[str, Any] = {"type": wanted.type, "count": count, **each[wanted.index or 0], "each": each}
    if wanted.type == "cuda":
        found |= {"cudnn": torch.backends.cudnn.version(), "driver": _driver()}  # on ROCm the former is MIOpen's
    return {**found, "tf32": _tf32()}


def _properties(kind: str, index: int) -> Any:
    """What torch tells of one device, an object with attributes or a mapping; ``None`` where it tells nothing."""
    import torch

    ask = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return None if ask is None else ask(index)


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


def _tf32() -> str:
    """What is in force while models run: ``off``, or what of it the settings of a run could not switch off."""
    from hashbench.run.settings import deterministic_settings, lower_precisions

    with deterministic_settings("on"):
        return ", ".join(lower_precisions()) or "off"


def _driver() -> str:
    """The version of NVIDIA's or AMD's kernel module; empty where there is none to read."""
    for path, pattern in _DRIVERS:
        try:
            found = re.search(pattern, Path(path).read_text(encoding="utf-8"))
        except OSError:
            continue
        if found:
            return found[1]
    return ""


def _key(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def main(device: str) -> int:
    """Print the fingerprint, or the error, as JSON; returns the exit code."""
    try:
        print(json.dumps({**collect(device), "digests": _digests(device)}))
    except HashbenchError as error:
        print(json.dumps({"error": {"what": error.what, "consequence": error.consequence, "tip": error.tip}}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
