"""What the collectives alone say of the order of records on different ranks."""

from __future__ import annotations

import pytest

from hashbench.core.divergence.collective_calls import number_calls
from hashbench.extensions.ranks.order import RankOrder
from tests.core.divergence.rank_runs import rank_traces

LINES = """
rank 0:
    relu input/0 -> a
    send input/0 peer=1
    broadcast !input/0 root=2 -> b
rank 1:
    relu input/0 -> a
    recv !input/1 peer=0 -> w
    all_reduce !input/0 group=1-2 -> s
    broadcast !input/0 root=2 -> b
rank 2:
    relu input/0 -> a
    all_reduce !input/0 group=1-2 -> s
    relu input/0 -> a
    broadcast !input/0 root=2 -> b
"""


@pytest.mark.parametrize(
    ("start", "reached"),
    [
        ({0: 0}, {0: 0, 1: 1, 2: 1}),
        ({0: 1}, {0: 1, 1: 1, 2: 1}),
        ({0: 2}, {0: 2}),
        ({1: 0}, {0: 2, 1: 0, 2: 1}),
        ({1: 3}, {1: 3}),
        ({2: 2}, {0: 2, 1: 3, 2: 2}),
        ({0: 2, 2: 3}, {0: 2, 1: 3, 2: 3}),
    ],
)
def test_where_data_of_a_rank_may_have_come(start: dict[int, float], reached: dict[int, float]) -> None:
    traces = rank_traces(LINES)
    calls = number_calls(traces)
    places = {
        rank: {
            calls[rank].by_record[record.id]: float(place)
            for place, record in enumerate(trace.records)
            if record.id in calls[rank].by_record
        }
        for rank, trace in traces.items()
    }
    assert RankOrder(calls, places).reached_from(start) == reached
