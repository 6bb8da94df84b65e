"""The shards of one sweep, run with ``--total-partitions`` and ``--partition-id``, joined into the folder of the whole.

The result is what a sweep that was never cut would have left: rows in the order of the selection, logs, traces, repros,
and the environments of all machines. What is not certain to belong together is refused; nothing in the shards is
changed, and the output appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import facts_asked
from hashbench.core.io import UnknownContentError, from_json, read_json_object
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.folder import (
    NOT_A_ROW,
    Model,
    Partition,
    ResultsFolder,
    changed_suites,
    checked_manifest,
    file_key,
    of_another_version,
    option_differences,
    row_in,
    schema_difference,
    with_models,
)
from hashbench.core.text import count, join_limited

_MOST_PARTITIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Merged:
    """What is in ``output`` now: ``rows`` rows of ``shards`` shards. ``missing`` models have none."""

    output: Path
    rows: int
    shards: int
    missing: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard, read and found whole: ``rows`` by model, ``environments`` the one of its last part first."""

    folder: ResultsFolder
    manifest: Mapping[str, Any]
    partition: Partition
    rows: Mapping[Model, Row]
    environments: tuple[Mapping[str, Any], ...]


def merge(output: Path, folders: Sequence[Path], *, allow_missing: bool = False) -> Merged:
    """Join the shards in ``folders`` into ``output``, which must not exist or be empty.

    Args:
        allow_missing: models of partitions that are not there have no row; the merged ``sweep.json`` still asks for
            them, so that ``hashbench compare`` reports them and ``hashbench sweep --resume`` runs them.

    Raises:
        HashbenchError: a folder is not a shard, or unfinished, damaged or of another schema; shards hold the same
            model, are of other selections or options, or one is missing; or ``output`` cannot be written.
    """
    output = output.absolute()
    _refuse_output(output, folders)
    shards = sorted((_read(folder) for folder in folders), key=lambda shard: shard.partition.id)
    whole = _whole(shards)
    missing = tuple(model for model in whole if not any(model in shard.rows for shard in shards))
    if missing and not allow_missing:
        raise _is_missing(shards, missing)
    with _appearing(output) as folder:
        _write(folder, shards, whole)
    return Merged(output, rows=len(whole) - len(missing), shards=len(shards), missing=missing)


def _refuse_output(output: Path, folders: Sequence[Path]) -> None:
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise HashbenchError(
            f"{output} is not an empty folder",
            consequence="nothing in it was touched",
            tip="Name a new folder; the shards come after it: hashbench merge OUTPUT DIR DIR…",
        )
    for folder in folders:
        if output.resolve().is_relative_to(folder.resolve()):
            raise HashbenchError(
                f"{output} would be inside of {folder}",
                consequence="merge changes nothing in the shards, so nothing was merged",
                tip="Name a folder outside of them.",
            )


# ------------------------------------------------------------------------------------------------ reading


def _read(path: Path) -> _Shard:
    folder = ResultsFolder(path)
    if not path.is_dir():
        raise HashbenchError(f"{path} does not exist", consequence="nothing was merged", tip="Name a shard's folder.")
    manifest = read_json_object(folder.manifest)
    other = schema_difference(manifest)
    if other:
        raise HashbenchError(f"cannot merge {path}", consequence=other, tip=_MERGE_WITH_THE_WRITER)
    if folder.is_being_written():
        raise HashbenchError(
            f"a sweep is writing into {folder.path}", consequence="nothing was merged", tip="Wait until it ends."
        )
    try:
        manifest = checked_manifest(manifest)
        models, mode = _models(manifest["models"]), manifest["options"]["mode"]
        part = manifest["partition"]
        partition = Partition(part["id"], part["total"], _models(part.get("of", manifest["models"])))
    except ValueError as error:
        raise _damaged(path, "its sweep.json does not say which models belong to it") from error
    if not 0 <= partition.id < partition.total <= _MOST_PARTITIONS:
        raise _damaged(path, f"its sweep.json says that it is partition {partition.id} of {partition.total}")
    rows = dict(_rows(folder, models, mode))
    lacking = [name for suite, name in models if (suite, name) not in rows]
    if lacking:
        raise HashbenchError(
            f"{folder.path} is not finished",
            consequence=f"{len(lacking)} of {len(models)} models have no row ({join_limited(lacking, 3)})",
            tip="Complete it: repeat its command with --resume.",
        )
    own = read_json_object(folder.environment)
    previous = own.pop("previous", [])
    if not isinstance(previous, list) or not all(isinstance(environment, dict) for environment in previous):
        raise _damaged(folder.path, "its environment.json does not say where its rows were made")
    return _Shard(folder, manifest, partition, rows, (own, *previous))


def _models(value: Iterable[Sequence[str]]) -> tuple[Model, ...]:
    return tuple((suite, name) for suite, name in value)


def _rows(folder: ResultsFolder, models: Sequence[Model], mode: str) -> Iterator[tuple[Model, Row]]:
    for suite, name in models:
        path = folder.row_path(file_key(suite=suite, mode=mode, name=name))
        try:
            yield (suite, name), row_in(path, ModelSpec(suite=suite, name=name), mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error)) from error
        except UnknownContentError as error:
            raise of_another_version(path, error, tip=_MERGE_WITH_THE_WRITER) from error
        except NOT_A_ROW as error:
            raise _damaged(folder.path, f"rows/{path.name} is not a row of {name}", tip=_RUN_AGAIN) from error


_MERGE_WITH_THE_WRITER = "Merge with the hashbench that wrote it."
_RUN_AGAIN = "It is damaged: --resume sets it aside and runs the model again."


def _damaged(path: Path, why: str, *, tip: str = "It is damaged; sweep again.") -> HashbenchError:
    return HashbenchError(f"cannot merge {path}", consequence=why, tip=tip)


# ------------------------------------------------------------------------------------- what belongs together


def _whole(shards: Sequence[_Shard]) -> tuple[Model, ...]:
    """Return the selection that all shards are parts of, in its order."""
    first, *others = shards
    for other in others:
        differences = _differences(first, other)
        if differences:
            raise HashbenchError(
                f"{first.folder.path} and {other.folder.path} are not shards of one sweep",
                consequence="; ".join(differences),
                tip="Run all shards with the same flags and the same version, apart from --partition-id.",
            )
    owners: dict[Model, _Shard] = {}
    for shard in shards:
        for model in shard.rows:
            owner = owners.setdefault(model, shard)
            if owner is not shard:
                raise HashbenchError(
                    f"{owner.folder.path} and {shard.folder.path} both hold {model[1]} of {model[0]}",
                    consequence="a sweep has one row for each model",
                    tip="Leave one of the two out.",
                )
    strange = [model[1] for model in owners if model not in set(first.partition.of)]
    if strange:
        raise _damaged(
            first.folder.path, f"the selection of which it is a part does not have {join_limited(strange, 3)}"
        )
    return first.partition.of


def _differences(first: _Shard, other: _Shard) -> list[str]:
    differences = option_differences(first.manifest, other.manifest)
    if first.partition.total != other.partition.total:
        differences.append(f"one is of {first.partition.total} partitions, the other of {other.partition.total}")
    elif first.partition.total == 1:
        differences.append("both are whole sweeps, without --total-partitions")
    elif first.partition.of != other.partition.of:
        differences.append("they are parts of other selections of models")
    changed = sorted(changed_suites(first.manifest, other.manifest))
    if changed:
        differences.append(f"the files of {join_limited(changed, 3)} changed between them")
    return differences


def _is_missing(shards: Sequence[_Shard], missing: Sequence[Model]) -> HashbenchError:
    total = shards[0].partition.total
    absent = sorted(set(range(total)) - {shard.partition.id for shard in shards})
    which = f"partition {', '.join(map(str, absent))} of {total} is" if absent else "a part of the selection is"
    return HashbenchError(
        f"{which} missing",
        consequence=f"{count(len(missing), 'model')} would have no row "
        f"({join_limited([name for _, name in missing], 3)})",
        tip="Name its folder, too, or add --allow-missing: `hashbench compare` then reports them as missing.",
    )


# ----------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[ResultsFolder]:
    """Yield a draft folder beside ``output``; rename it to ``output`` on success and delete it on failure."""
    draft = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield ResultsFolder(draft)
        draft.rename(output)
    except OSError as error:
        raise HashbenchError(
            f"cannot write {output}", consequence=error.strerror or str(error), tip="Name another folder."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(folder: ResultsFolder, shards: Sequence[_Shard], whole: Sequence[Model]) -> None:
    for path in (folder.rows, folder.logs, folder.traces):
        path.mkdir()
    for shard in shards:
        _copy(shard, folder)
    rows = {model: row for shard in shards for model, row in shard.rows.items()}
    began = min(str(shard.manifest.get("began", "")) for shard in shards)
    folder.write_manifest(with_models({**shards[0].manifest, "began": began}, whole, Partition()))
    folder.write_environments([environment for shard in shards for environment in shard.environments])
    asked = facts_asked(from_json(RunOptions, shards[0].manifest["options"]))
    folder.rebuild_csv((rows[model] for model in whole if model in rows), asked=asked)


def _copy(shard: _Shard, folder: ResultsFolder) -> None:
    """Copy the rows of a shard, and whatever else lies in folders of its own, beside what other shards left there. A
    link could lead anywhere, and a file that is there already is another model's."""
    for suite, name in shard.rows:
        key = file_key(suite=suite, mode=shard.manifest["options"]["mode"], name=name)
        shutil.copyfile(shard.folder.row_path(key), folder.row_path(key))
    for source in sorted(shard.folder.path.rglob("*")):
        path = source.relative_to(shard.folder.path)
        target = folder.path / path
        if path.parts[0] == shard.folder.rows.name or (len(path.parts) == 1 and not source.is_dir()):
            continue
        if source.is_symlink() or not (source.is_dir() or source.is_file()):
            raise _damaged(shard.folder.path, f"{path} is {'a link' if source.is_dir() else 'not a plain file'}")
        if source.is_dir():
            target.mkdir(exist_ok=True)
        elif target.exists():
            raise _damaged(shard.folder.path, f"another shard has {path}, too")
        else:
            shutil.copyfile(source, target)
