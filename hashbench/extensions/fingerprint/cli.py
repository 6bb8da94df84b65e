"""The subcommand ``fingerprint``: record the outputs of every kernel of a suite, and verify them later or elsewhere."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from hashbench.cli import flags
from hashbench.cli.flags import made_of, say
from hashbench.cli.parser import Commands, Flags, OneLineParser
from hashbench.cli.reading import add_suites, suites_to_sweep
from hashbench.core.errors import HashbenchError
from hashbench.core.records import RunOptions


def add_flags(given: Flags) -> None:
    """Add ``--fingerprints``."""
    text = "Record kernel fingerprints as well, for compare and nightly (docs/fingerprint.md)."
    given.add_argument("--fingerprints", action="store_true", help=text)


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    text = "Record kernel outputs on synthetic inputs, and verify them after an upgrade."
    kinds = Commands(commands.add_parser("fingerprint", help=text), "record|verify")
    _add_record(kinds.add_parser("record", help="Run every kernel of the models of a suite and record its outputs."))
    _add_verify(kinds.add_parser("verify", help="Rerun recorded kernels here and name those that changed."))


def _add_record(record: OneLineParser) -> None:
    record.set_defaults(command=_record)
    modes = record.exclusive(required=True)
    for mode, text in (("training", "Run forward, backward and optimizer step."), ("inference", "Run forward only.")):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=text)
    which = record.group("which models")
    add_suites(which, default=["torchvision"], otherwise="torchvision")
    flags.models(which)
    flags.several(which, "--exclude-exact", metavar="M", text="Exclude the model M.")
    run = record.group("how each model runs")
    run.add_argument("-d", "--device", default="cpu", metavar="D", help="Run on device D: cpu, cuda, xpu, …")
    flags.dtype(run)
    flags.whole(run, "--batch-size", text="Override the batch size of every model with N.")
    flags.whole(run, "--threads", "-t", text="Call torch.set_num_threads(N).")
    flags.seed(run)
    flags.deterministic(run)
    flags.tracer(run)
    flags.seconds(run, "--timeout", "Stop a model after S seconds.", least=1, default=600.0)
    record.add_argument(
        "-o",
        "--output",
        type=flags.file_to_write,
        required=True,
        metavar="FILE",
        help="Write the fingerprints into FILE.",
    )


def _record(parsed: argparse.Namespace) -> int:
    from hashbench.core.extensions import preload_to
    from hashbench.core.run.environment import tracer_note
    from hashbench.core.suites import registry
    from hashbench.core.suites.selection import Selection
    from hashbench.core.sweep.request import local_devices
    from hashbench.extensions.fingerprint import after_sweep as fingerprints
    from hashbench.extensions.fingerprint import document, text

    suites = suites_to_sweep(parsed)
    specs = made_of(Selection, parsed, suites=suites).of(spec for suite in suites for spec in registry.catalog(suite))
    devices = local_devices(parsed.device, parsed.tracer, preload=preload_to("fingerprint"))
    for note in filter(None, [*devices.notes, tracer_note(devices.environment)]):
        say(note)
    recording = fingerprints.record(
        specs,
        made_of(RunOptions, parsed, device=devices.device, output=""),
        executor=devices.executor(),
        environment=devices.environment,
        timeout=parsed.timeout,
        on_progress=say,
    )
    document.write(parsed.output, recording.together)
    flags.show(text.recorded_text(recording.together, nbytes=parsed.output.stat().st_size))
    print(f"\nWritten: {parsed.output}")
    return 0


def _add_verify(verify: OneLineParser) -> None:
    verify.set_defaults(command=_verify)
    verify.add_argument("file", type=Path, metavar="FILE", help="Read the fingerprints in FILE, written by record.")
    flags.words(verify, "--only", metavar="M", text="Verify only the models M.")
    flags.whole(verify, "--threads", "-t", text="Call torch.set_num_threads(N) (default: torch's own choice).")
    text = "Import FILE, a Python file, library or module that defines ops."
    flags.several(verify, "--import", dest="imports", metavar="FILE", text=text)
    flags.report(verify)


def _verify(parsed: argparse.Namespace) -> int:
    from hashbench.core.run.environment import collect_in_child
    from hashbench.extensions.fingerprint import document, text
    from hashbench.extensions.fingerprint.verify import VerifyRequest, verify

    fingerprints = document.read(parsed.file)
    request = VerifyRequest(str(parsed.file), tuple(parsed.only), tuple(parsed.imports), parsed.threads)
    device = next((model.device for model in request.chosen(fingerprints).models), "cpu")
    here = collect_in_child(device=device, variables={}, tracer="python")
    if parsed.threads:
        here["threads"]["intra_op"] = parsed.threads
    verification = verify(fingerprints, request, on_progress=say)
    if not verification.same and not verification.changed:
        reasons = "; ".join(verification.not_run) or "it has no kernels"
        raise HashbenchError(f"cannot verify {parsed.file}", consequence=f"no kernel could be compared ({reasons})")
    again = shlex.join(["hashbench", "fingerprint", "verify", str(parsed.file)])
    found = text.finding_of(verification, recorded=fingerprints.environment, here=here, command=again)
    return flags.show_finding(found, parsed, title="hashbench fingerprint verify", of=str(parsed.file))
