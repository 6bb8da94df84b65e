"""``hashbench pipeline``: does a training pipeline repeat, and where does it part?

``hashbench numeric``: a model before and after a transformation, compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hashbench.cli.flags import EXIT_DIFFERENCE, LARGEST_SEED, LONGEST_SECONDS, Commands, OneLineParser, at_least
from hashbench.errors import HashbenchError
from hashbench.records import DETERMINISTIC


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    _add_pipeline(commands)
    _add_numeric(commands)


# ------------------------------------------------------------------------------------------------------ pipeline


def _add_pipeline(commands: Commands) -> None:
    pipeline = commands.add_parser("pipeline", help="data loading, transforms, initial weights, first predictions")
    kinds = pipeline.add_subparsers(metavar="check|compare", required=True, parser_class=OneLineParser)
    _add_check(kinds.add_parser("check", help="run a pipeline twice, in fresh processes, and write what was seen"))
    compare = kinds.add_parser("compare", help="the first stage at which two checks differ, and why")
    compare.add_argument("first", type=Path, metavar="CHECK1")
    compare.add_argument("second", type=Path, metavar="CHECK2")
    _add_format(compare)
    compare.set_defaults(command=_compare)


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="Python with make_loader(seed), or YAML that names it",
    )
    check.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="a new folder")
    check.add_argument(
        "--timeout",
        type=at_least(1, float, most=LONGEST_SECONDS),
        default=600.0,
        metavar="S",
        help="seconds for each run (default 600)",
    )
    check.add_argument("--once", action="store_true", help="do not run it again")
    _add_format(check)
    check.set_defaults(command=_check)


def _add_format(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=("text", "json"), default="text")


def _check(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import checking, comparing

    made = checking.check(parsed.config, parsed.output_dir, timeout=parsed.timeout, repeat=not parsed.once)
    if made.verdict is None:
        print(f"Check: {parsed.output_dir}")
        return 0
    if parsed.format == "json":
        print(comparing.as_json(made.verdict))
    else:
        print(comparing.as_text(made.verdict, first="the first run", second="the second"))
        print(f"\nCheck: {parsed.output_dir}")
    return 0 if made.verdict.repeats else EXIT_DIFFERENCE


def _compare(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import comparing, observed

    comparison = comparing.compare(observed.read(parsed.first), observed.read(parsed.second))
    if parsed.format == "json":
        print(comparing.as_json(comparison))
    else:
        print(comparing.as_text(comparison, first=str(parsed.first), second=str(parsed.second)))
    return 0 if comparison.repeats else EXIT_DIFFERENCE


# ------------------------------------------------------------------------------------------------------- numeric


def _add_numeric(commands: Commands) -> None:
    numeric = commands.add_parser("numeric", help="a model before and after a transformation, compared")
    numeric.add_argument("file", type=Path, metavar="FILE.py", help="defines before(), after(model) and inputs()")
    mode = numeric.add_mutually_exclusive_group()
    mode.add_argument("--training", action="store_const", const=True, dest="training", help="in train() mode")
    mode.add_argument(
        "--inference", action="store_const", const=False, dest="training", help="in eval() mode, without gradients"
    )
    number = at_least(0, float)
    numeric.add_argument("--iterations", type=at_least(1), default=2, metavar="N", help="steps (default 2)")
    numeric.add_argument("--precision", type=number, metavar="X", help="rtol and atol (default: those of the dtype)")
    numeric.add_argument("--rtol", type=number, metavar="X", help="relative tolerance")
    numeric.add_argument("--atol", type=number, metavar="X", help="absolute tolerance")
    numeric.add_argument("--stages", metavar="S,S", help="what is compared (default: all, or the file's STAGES)")
    numeric.add_argument(
        "--ignore", action="append", default=[], metavar="FORM", help="dtype, device or layout: may differ"
    )
    numeric.add_argument("--trace", action="store_true", help="name the first op at which the two part")
    numeric.add_argument("--deterministic", choices=DETERMINISTIC, default="on")
    numeric.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N")
    numeric.add_argument("--lines", type=at_least(1), default=20, metavar="N", help="of the table (default 20)")
    numeric.add_argument("--json", type=Path, metavar="F", help="write all that was found to F")
    numeric.set_defaults(command=_numeric, training=None)


def _numeric(parsed: argparse.Namespace) -> int:
    from hashbench.io import replace_file
    from hashbench.tools.numeric import STAGES, as_json, as_text, run_model, userfile

    model_file = userfile.load(parsed.file, seed=parsed.seed)
    asked = None if parsed.stages is None else tuple(word.strip() for word in parsed.stages.split(",") if word.strip())
    report = run_model(
        model_file.before,
        model_file.after,
        model_file.inputs,
        parsed.iterations,
        parsed.precision,
        rtol=parsed.rtol,
        atol=parsed.atol,
        training=parsed.training,
        stages=next((stages for stages in (asked, model_file.stages) if stages is not None), STAGES),
        rename=model_file.rename,
        ignore=parsed.ignore,
        loss=model_file.loss,
        make_optimizer=model_file.make_optimizer,
        deterministic=parsed.deterministic,
        seed=parsed.seed,
        trace=parsed.trace,
    )
    print(as_text(report, limit=parsed.lines))
    if parsed.json is not None:
        try:
            replace_file(parsed.json, as_json(report))
        except OSError as error:
            raise HashbenchError(f"cannot write {parsed.json}", consequence=str(error.strerror or error)) from error
    return 0 if report else EXIT_DIFFERENCE
