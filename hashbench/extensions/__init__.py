"""The extensions: one entry for each capability beside the core, each in the folder of its name.

A folder that is deleted takes its capability along: its entry is then skipped.
"""

from __future__ import annotations

from pathlib import Path

from hashbench.core.extensions import Extension

_PACKAGE = Path(__file__).parents[1]

_DECLARED: tuple[Extension, ...] = (
    Extension(
        "ranks",
        takes=lambda model: (model.world_size or 1) > 1,
        own_check="hashbench.extensions.ranks.check:check_model",
        commands="hashbench.extensions.ranks.cli",
        facts="hashbench.extensions.ranks.facts:RankFacts",
        words="hashbench.extensions.ranks.row_text:WORDS",
    ),
    Extension(
        "invariance",
        run_flags="hashbench.extensions.invariance.cli:add_flags",
        audit="hashbench.extensions.invariance.ops.table:INVARIANCE",
        audit_flags="hashbench.extensions.invariance.cli:add_audit_flags",
        asked=lambda options: options.batch_invariant,
        check="hashbench.extensions.invariance.check:check_model",
        facts="hashbench.extensions.invariance.facts:BatchFacts",
        words="hashbench.extensions.invariance.row_text:WORDS",
    ),
    Extension(
        "compiled",
        run_flags="hashbench.extensions.compiled.cli:add_flags",
        asked=lambda options: bool(options.backend),
        check="hashbench.extensions.compiled.check:check_model",
        facts="hashbench.extensions.compiled.facts:CompiledFacts",
        words="hashbench.extensions.compiled.text:WORDS",
        remarks="hashbench.extensions.compiled.report:compilation_remarks",
    ),
    Extension(
        "implementations",
        numeric_flags="hashbench.extensions.implementations.cli:add_flags",
        numeric="hashbench.extensions.implementations.cli:answer",
    ),
    Extension(
        "kernels",
        numeric_flags="hashbench.extensions.kernels.cli:add_flags",
        numeric="hashbench.extensions.kernels.cli:answer",
    ),
    Extension(
        "stress",
        run_flags="hashbench.extensions.stress.cli:add_flags",
        asked=lambda options: options.stress,
        stage="hashbench.extensions.stress.stage:add_stressed_runs",
        facts="hashbench.extensions.stress.facts:StressFacts",
        words="hashbench.extensions.stress.text:WORDS",
    ),
    Extension(
        "fingerprint",
        sweep_flags="hashbench.extensions.fingerprint.cli:add_flags",
        commands="hashbench.extensions.fingerprint.cli",
        remarks="hashbench.extensions.fingerprint.kernels:kernel_remarks",
        kernels="hashbench.extensions.fingerprint.kernels:kernel_signs",
        asked_of_sweep=lambda request: request.fingerprints,
        after_sweep="hashbench.extensions.fingerprint.after_sweep:record_missing",
        forget="hashbench.extensions.fingerprint.after_sweep:remove",
        preload=("hashbench.extensions.fingerprint.library:measure_clock",),  # spares each worker up to a second
    ),
    Extension(
        "ray",
        sweep_flags="hashbench.extensions.ray.cli:add_flags",
        executor="hashbench.extensions.ray.executor:connected",
    ),
    Extension(
        "watch",
        commands="hashbench.extensions.watch.cli",
    ),
    Extension(
        "report",
        commands="hashbench.extensions.report.cli",
    ),
    Extension("debugmode", diffs="hashbench.extensions.debugmode.diff"),
    Extension("audit", folder="tools/audit", owns_file="hashbench.tools.audit.audit_table:audit_kind"),
)
_HERE = {each.name for each in _DECLARED if (_PACKAGE / (each.folder or f"extensions/{each.name}")).is_dir()}

EXTENSIONS = tuple(each for each in _DECLARED if each.name in _HERE)
"""In the order in which they are asked: the first check that applies is the one that runs."""

MISSING = tuple(each.name for each in _DECLARED if each.name not in _HERE)
"""Names of those without a folder."""
