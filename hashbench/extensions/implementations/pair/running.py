"""Build a side and record one run of it: in this process, or in one process for each of its ranks."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from hashbench.core.diagnose.rank_processes import Peers, started
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.run.rng import preserved_rng
from hashbench.core.text import count, in_brackets
from hashbench.core.trace.arguments import raising_line
from hashbench.extensions.implementations.pair.record import RecordedRun, SideRunError, record_run
from hashbench.extensions.implementations.pair.run_files import read_run, write_run
from hashbench.extensions.implementations.pair.shards import merged, own_names
from hashbench.extensions.implementations.pair.sides import BuiltSide, Side, build, build_wide


def recorded(
    side: Side,
    seed: int,
    *,
    wide: bool,
    keep: frozenset[str] = frozenset(),
    given: Mapping[str, torch.Tensor] | None = None,
) -> RecordedRun:
    """Build a side and record a run of it; one of several ranks in as many processes, merged.

    Args:
        side: what is run.
        seed: of the generators.
        wide: compute in float64, and keep moments; otherwise keep digests.
        keep: ids of nodes whose values are kept, and the calls that wrote them.
        given: contents that replace those of nodes as they are written; not on ranks.

    Raises:
        HashbenchError: a rank raised, died, or did not end in time.
        SideRunError: the model raised.
    """
    if side.ranks > 1:
        return _on_ranks(side, seed, wide=wide, keep=keep)
    with preserved_rng():
        built = build_wide(side, seed) if wide else build(side, seed)
        return _recorded(built, wide=wide, keep=keep, given=given or {})


def _recorded(side: BuiltSide, *, wide: bool, keep: frozenset[str], given: Mapping[str, torch.Tensor]) -> RecordedRun:
    if side.widened:
        try:
            return _recorded(replace(side, widened=()), wide=wide, keep=keep, given=given)
        except SideRunError:  # torch compares some dtypes before an op is dispatched
            pass
    run = record_run(side.run, side.leaves(), model=side.module, wide=wide, keep=keep, given=given)
    return replace(run, rebuilt=side.rebuilt)


@contextmanager
def naming(side: str) -> Iterator[None]:
    """Raise a :class:`HashbenchError` that names a side, for whatever its functions raise in their own dtype."""
    try:
        yield
    except HashbenchError:
        raise
    except SideRunError as error:
        what, said, cause = "run", str(error), error.__cause__
    except Exception as error:
        place = in_brackets(raising_line(error))
        what, said, cause = "build", f"{named_line(error)}{place}", error
    else:
        return
    tip = "It must run alone before it can be compared."
    raise HashbenchError(f"cannot {what} {side}", consequence=f"it raised {said}", tip=tip) from cause


# ------------------------------------------------------------------------------------------------------- ranks


def _on_ranks(side: Side, seed: int, *, wide: bool, keep: frozenset[str]) -> RecordedRun:
    ranks = count(side.ranks, "rank")
    with tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True) as folder:
        arguments = _packed(side), seed, wide, keep
        target = f"{__name__}:record_rank"
        with started(target, arguments, world_size=side.ranks, folder=Path(folder)) as processes:
            ends = processes.wait(side.rank_seconds)
        if failed := [end for end in ends if end.status != 0]:
            end = min(failed, key=lambda each: (not each.died, each.seconds))
            tip = "Run make() and the model under torchrun to see it alone."
            if not end.died:
                tip = f"It had {side.rank_seconds:g} s. Look for a collective that not every rank calls."
            raise HashbenchError(f"cannot run a side on {ranks}", consequence=end.in_words(), tip=tip)
        return merged([read_run(Path(folder, f"run{rank}")) for rank in range(side.ranks)])


def _packed(side: Side) -> bytes:
    """Return what another process builds the side from: its functions by name, or the call that makes it."""
    functions = () if side.again else (side.make, side.inputs, side.outputs, side.loss)
    why = "they are defined in the program that runs" if any(map(_is_of_script, functions)) else ""
    try:
        packed = pickle.dumps(side.again or side)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = named_line(error)
    if not why:
        return packed
    raise HashbenchError(
        f"cannot run a side on {count(side.ranks, 'rank')}",
        consequence=f"its functions cannot be sent to other processes ({why})",
        tip="Define them at the top level of a module, or write a pair file with RANKS_B.",
    )


def _is_of_script(function: object) -> bool:
    return getattr(function, "__module__", "") == "__main__"


def record_rank(peers: Peers, packed: bytes, seed: int, wide: bool, keep: frozenset[str]) -> None:
    """Record a side in this process, one of several ranks, and write the run into the folder in which they meet."""
    import torch.distributed as dist

    made = pickle.loads(packed)  # of this user, in our process
    if isinstance(made, tuple):
        made = resolve_name(made[0])(*made[1])
    with peers.group(number=0):
        run = recorded(replace(made, ranks=1), seed, wide=wide, keep=own_names(keep, peers.rank))
        dist.barrier()  # no rank leaves while another one still receives
    write_run(run, peers.folder / f"run{peers.rank}")
