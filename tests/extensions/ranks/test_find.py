"""Truth table of divergences across ranks: two runs, and the rank and kernel, or the collective, that is named.

The first line of a case is its name and, behind a colon, the divergences that are first: rank, origin and op; those
behind ``later`` come later. Further lines begin with ``through`` and ``unknown``. No torch here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import Collective, OpRecord, Ref, Result, TensorDigest, Trace, TracedRank
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.verdict import RankDivergence, RanksVerdict
from hashbench.extensions.ranks.whole_steps import cut_after
from tests.core.divergence.rank_runs import RankRun, judge_ranks, rank_traces

TABLE = """
nothing differs: agree
    rank 0:
        x = all_reduce !input/0=a -> s
        sum x => r
    rank 1:
        x = all_reduce !input/0=b -> s
        sum x => r

a kernel in front of an all-reduce: 1 kernel put
    through rank 1: aten.put -> all_reduce #1 of group 0-1 -> rank 0
    rank 0:
        x = relu input/0 -> a
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a kernel behind a collective that agrees: 1 kernel put
    through
    rank 0:
        x = all_reduce !input/0=a -> s
        sum x => r
    rank 1:
        x = all_reduce !input/0=b -> s
        put x => r|R

a kernel in front of a functional collective, which calls another: 0 kernel put
    through rank 0: aten.put -> all_reduce #1 of group 0-1 -> rank 1
    rank 0:
        x = put input/0 -> a|A
        c = clone x -> a|A in=_c10d_functional.all_reduce.default
        c = all_reduce !c -> pending in=_c10d_functional.all_reduce.default
        y = functional_all_reduce x inside=c -> s|S
        wait_tensor y
        sum y => r|R
    rank 1:
        x = relu input/0 -> b
        c = clone x -> b in=_c10d_functional.all_reduce.default
        c = all_reduce !c -> pending in=_c10d_functional.all_reduce.default
        y = functional_all_reduce x inside=c -> s|S
        wait_tensor y
        sum y => r|R

an all-reduce whose contributions are equal: 0 collective c10d.allreduce_
    through all_reduce #2 of group 0-1 -> ranks 0, 1
    rank 0:
        all_reduce !input/0=a -> s
        x = all_reduce !input/1=a -> s|S
        sum x => r|R
    rank 1:
        all_reduce !input/0=b -> s
        x = all_reduce !input/1=b -> s|S
        sum x => r|R

a guilty collective whose output one rank throws away: 1 collective c10d.allreduce_
    rank 0:
        all_reduce !input/1=a -> pending
        relu input/0 => r
    rank 1:
        x = all_reduce !input/1=b -> s|S
        sum x => r|R

the bytes that a rank gave were written by Python: 0 outside c10d.broadcast_
    rank 0:
        b = set_ input/0 -> w
        b = broadcast !b@p|P root=0 -> p|P
        sum b => r|R
    rank 1:
        b = empty -> blank
        b = broadcast !b root=0 -> p|P
        sum b => r|R

pickled bytes that differ and steer nothing: agree
    rank 0:
        b = set_ input/0 -> w
        b = broadcast !b@p|P root=0 -> p|P
        relu input/1 => r
    rank 1:
        b = empty -> blank
        b = broadcast !b root=0 -> p|P
        relu input/1 => r

a kernel beside pickled bytes that differ: 1 kernel put
    rank 0:
        b = set_ input/0 -> w
        b = broadcast !b@p|P root=0 -> p|P
        x = all_reduce !input/1 -> s|S
        sum x => r|R
    rank 1:
        b = empty -> blank
        b = broadcast !b root=0 -> p|P
        x = put input/1 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a rank gives memory that was never written: 0 kernel empty
    rank 0:
        x = empty -> blank
        x = all_reduce !x@j|J -> s|S
        sum x => r|R
    rank 1:
        x = all_reduce !input/0 -> s|S
        sum x => r|R

bytes of Python in memory that an op adopts: 0 outside set_
    rank 0:
        b = set_ !input/0 (<UntypedStorage>) -> blank
        b = broadcast !b@p|P root=0 -> p|P
        sum b => r|R
    rank 1:
        b = empty -> blank
        b = broadcast !b root=0 -> p|P
        sum b => r|R

times that ranks exchange, in front of what another one does otherwise: 1 sequence relu
    rank 0:
        b = set_ !input/0 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@p|P -> g|G
        x = all_reduce !input/1 -> s|S
        sum x => r|R
    rank 1:
        b = set_ !input/0 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@q|Q -> g|G
        1: x = relu input/1 -> c
        2: x = rsqrt input/1 -> C
        x = all_reduce !x -> s|S
        sum x => r|R

padding that was never written, beside a kernel: 1 kernel put
    rank 0:
        p = empty -> blank*8
        p = copy_ !p input/0 -> w
        x = all_gather !input/9 p@j|J -> s|S*8
        sum x => r|R
    rank 1:
        p = empty -> blank*8
        k = put input/0 -> a|A
        p = copy_ !p k -> a|A
        x = all_gather !input/9 p@k|K -> s|S*8
        sum x => r|R

other data on one rank: 1 input sum
    rank 0:
        x = all_reduce !parameter/Net.w=w -> s|S
        sum x => r|R
    rank 1:
        x = sum input/0=x|X -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

an unseeded generator on one rank: 0 rng rand
    rank 0:
        x = rand rng=1|2 -> a|A
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        x = rand rng=1 -> a
        x = all_reduce !x -> s|S
        sum x => r|R

another argument of a collective: 0 outside c10d.allreduce_
    rank 0:
        x = all_reduce !input/0 (SUM | MAX) -> s|S
        sum x => r|R
    rank 1:
        x = all_reduce !input/0=b -> s|S
        sum x => r|R

a scalar among the arguments of a collective: 0 kernel bincount
    rank 0:
        n = bincount input/0 -> n|N
        _local_scalar_dense n scalar=3|4
        x = all_to_all !input/8 input/1 (3 | 4) -> s|S
        sum x => r|R
    rank 1:
        x = all_to_all !input/8 input/1=b -> s
        sum x => r

a rank gives another tensor: 1 sequence c10d.allreduce_
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        a = neg input/0 -> a
        b = exp input/0 -> b
        x = all_reduce !a|b -> s|S
        sum x => r|R

a broadcast gives what the root has, whatever the others: 0 kernel put
    through rank 0: aten.put -> broadcast #1 of group 0-1-2 -> ranks 1, 2
    rank 0:
        x = put input/0 -> a|A
        x = broadcast !x root=0 -> a|A
        sum x => r|R
    rank 1:
        x = rand input/0 -> b|B
        x = broadcast !x root=0 -> a|A
        sum x => r|R
    rank 2:
        x = rand input/0 -> c|C
        x = broadcast !x root=0 -> a|A
        sum x => r|R

memory from outside that a broadcast overwrites: agree
    rank 0:
        x = broadcast !input/0=a root=0 -> a
        sum x => r
    rank 1:
        x = broadcast !other/n#0=g|G root=0 -> a
        sum x => r

memory from outside that the root of a broadcast gives: 0 outside c10d.broadcast_
    rank 0:
        x = broadcast !other/n#0=g|G root=0 -> a|A
        sum x => r|R
    rank 1:
        x = broadcast !input/0=a root=0 -> a|A
        sum x => r|R

a reduction to a root: 1 kernel put
    rank 0:
        x = reduce !input/0 root=0 -> s|S
        sum x => r|R
    rank 1:
        x = put input/0 -> b|B
        reduce !x root=0 -> b|B
        relu input/1 => r

uneven splits: 2 kernel put
    rank 0:
        y = all_to_all !input/9 input/0 (1, 2, 3) -> y|Y*8
        sum y => r|R
    rank 1:
        y = all_to_all !input/9 input/0 (2, 1, 3) -> y*8
        sum y => r
    rank 2:
        x = put input/0 -> b|B
        y = all_to_all !input/9 x (3, 1, 2) -> z|Z*8
        sum y => r|R

coalesced: 1 kernel put
    rank 0:
        z = all_reduce_coalesced !input/0 !input/1 -> s,t|T
        sum z => r|R
    rank 1:
        x = relu input/0 -> a
        y = put input/1 -> b|B
        z = all_reduce_coalesced !x !y -> s,t|T
        sum z => r|R

through a pipeline of three ranks: 0 kernel put
    through rank 0: aten.put -> recv #1 from rank 0 to rank 1 in group 0-1-2 -> rank 1; \
rank 1: recv #1 from rank 1 to rank 2 in group 0-1-2 -> rank 2
    rank 0:
        x = put input/0 -> a|A
        send x peer=1
        relu input/1 => r
    rank 1:
        x = recv !input/5=e peer=0 -> a|A
        y = mul x -> b|B
        send y peer=2
        relu input/1 => r
    rank 2:
        x = recv !input/5=e peer=1 -> b|B
        sum x => r|R

messages with tags out of order: 0 kernel put
    rank 0:
        x = put input/0 -> a|A
        y = relu input/1 -> b
        send x peer=1 tag=7
        send y peer=1 tag=8
        relu input/2 => r
    rank 1:
        v = recv !input/5=e peer=0 tag=8 -> b
        w = recv !input/6=e peer=0 tag=7 -> a|A
        sum w => r|R

two groups over the same ranks in turns: 1 kernel put
    through rank 1: aten.put -> all_reduce #1 of second group 0-1 -> rank 0
    rank 0:
        x = all_reduce !input/0 -> s
        y = all_reduce !input/1 ordinal=1 -> t|T
        sum y => r|R
    rank 1:
        z = put input/1 -> b|B
        y = all_reduce !z ordinal=1 -> t|T
        x = all_reduce !input/0=q -> s
        sum y => r|R

subgroups: 3 kernel put
    rank 0:
        x = all_reduce !input/0 group=0-1 -> s
        y = all_reduce !x group=0-2 -> t|T
        sum y => r|R
    rank 1:
        x = all_reduce !input/0=b group=0-1 -> s
        y = all_reduce !x group=1-3 -> u|U
        sum y => r|R
    rank 2:
        x = all_reduce !input/0 group=2-3 -> v|V
        y = all_reduce !x group=0-2 -> t|T
        sum y => r|R
    rank 3:
        x = put input/0 -> d|D
        x = all_reduce !x group=2-3 -> v|V
        y = all_reduce !x group=1-3 -> u|U
        sum y => r|R

messages of equal content arrive in another order: 0 collective c10d.recv_any_source_
    through recv_any_source #1 from rank 1 to rank 0 in group 0-1-2 -> rank 0
    rank 0:
        x = recv_any !input/0=e -> a|b
        y = recv_any !input/1=e -> b|a
        mul x y => r|R
    rank 1:
        x = relu input/0 -> a
        send x peer=0
        relu x => r
    rank 2:
        x = relu input/0 -> b
        send x peer=0
        relu x => r

a message from any source whose content differs: 2 kernel put
    rank 0:
        x = recv_any !input/0=e -> a
        y = recv_any !input/1=e -> b|B
        mul x y => r|R
    rank 1:
        x = relu input/0 -> a
        send x peer=0
        relu x => r
    rank 2:
        x = put input/0 -> b|B
        send x peer=0
        relu x => r|R

another order of arrival, behind a kernel: 1 kernel put later 0 collective c10d.recv_any_source_
    rank 0:
        z = all_reduce !input/5 -> z|Z
        x = recv_any !input/0=e -> a|b
        y = recv_any !input/1=e -> b|a
        v = mul x y -> v|V
        mul z v => r|R
    rank 1:
        z = put input/5 -> y|Y
        z = all_reduce !z -> z|Z
        x = relu input/0 -> a
        send x peer=0
        relu z => r|R
    rank 2:
        z = all_reduce !input/5 -> z|Z
        x = relu input/0 -> b
        send x peer=0
        relu z => r|R

an order of arrival that the later messages follow from: 0 collective c10d.recv_any_source_
    rank 0:
        x = recv_any !input/0=e -> a|b
        send x peer=1
        send x peer=2
        y = recv_any !input/1=e -> b|a
        v = recv_any !input/2=e -> c|C
        w = recv_any !input/3=e -> d|D
        mul x v => r|R
    rank 1:
        x = relu input/0 -> a
        send x peer=0
        y = recv !input/3=e peer=0 -> a|b
        z = mul x y -> c|C
        send z peer=0
        relu y => r|R
    rank 2:
        x = relu input/0 -> b
        send x peer=0
        y = recv !input/3=e peer=0 -> a|b
        z = mul x y -> d|D
        send z peer=0
        relu y => r|R

a rank without a trace gave something: 0 ranks nothing
    unknown No trace of rank 2 in either run.
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        x = all_reduce !input/0 -> s|S
        put x => r|R
    rank 2:
        no trace

a rank without a trace beside a rank with a kernel: 1 kernel put
    unknown No trace of rank 2 in the second run.
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        y = put input/0 -> y|Y
        x = all_reduce !y -> s|S
        sum x => r|R
    rank 2:
        2: no trace
        relu input/0 => r

a call that one rank's traces do not have: 0 ranks nothing
    unknown rank 0 1, rank 1 0
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        relu input/0 => r
        2: relu input/0

a group of one: 1 kernel c10d.allreduce_
    rank 0:
        x = all_reduce !input/0 group=0 -> a
        sum x => r
    rank 1:
        x = all_reduce !input/0 group=1 -> a|A
        sum x => r|R

something else is unknown of an op that exchanges data: 0 ranks nothing
    rank 0:
        x = mystery !input/0 -> a|A
        sum x => r|R
    rank 1:
        x = mystery !input/0 -> a
        sum x => r

an op of which nothing is known, told by the collective inside: 1 kernel put
    through rank 1: aten.put -> all_reduce #1 of group 0-1 -> rank 0
    rank 0:
        c = clone input/0 -> a in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s|S in=symm_mem.memcpy_to_multicast_.default
        x = mystery !input/0 inside=c -> s|S
        sum x => r|R
    rank 1:
        y = put input/0 -> b|B
        c = clone y -> b|B in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s|S in=symm_mem.memcpy_to_multicast_.default
        x = mystery !y inside=c -> s|S
        sum x => r|R

the collective inside such an op is guilty: 0 collective c10d.allreduce_
    rank 0:
        c = clone input/0 -> a in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s|S in=symm_mem.memcpy_to_multicast_.default
        x = mystery !input/0 inside=c -> s|S
        sum x => r|R
    rank 1:
        c = clone input/0 -> b in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s|S in=symm_mem.memcpy_to_multicast_.default
        x = mystery !input/0 inside=c -> s|S
        sum x => r|R

such an op computes otherwise behind the collective inside: 1 kernel symm_mem.memcpy_to_multicast_
    rank 0:
        c = clone input/0 -> a in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s in=symm_mem.memcpy_to_multicast_.default
        x = mystery !input/0 inside=c -> s
        sum x => r
    rank 1:
        c = clone input/0 -> b in=symm_mem.memcpy_to_multicast_.default
        c = all_reduce !c -> s in=symm_mem.memcpy_to_multicast_.default
        x = mystery !input/0 inside=c -> s|S
        sum x => r|R

the other factor of a product of what is gathered: 1 kernel put
    rank 0:
        x = gathered_matmul input/0 input/1 -> y
        sum x => r
    rank 1:
        w = put input/1 -> w|W
        x = gathered_matmul input/0 w -> y|Y
        sum x => r|R

a kernel in front of a message that is read and never waited for: 1 kernel put
    rank 0:
        x = recv !input/1 peer=1 -> pending
        sum x => r|R
    rank 1:
        x = put input/0 -> b|B
        send x peer=0

nothing in front of a message that is read and never waited for: 0 ranks nothing
    rank 0:
        x = recv !input/1 peer=1 -> pending
        sum x => r|R
    rank 1:
        x = relu input/0 -> b
        send x peer=0

a tensor within a pickled object: 1 kernel put
    through rank 1: aten.put -> recv #1 from rank 1 to rank 0 in group 0-1 -> rank 0
    rank 0:
        b = empty -> blank
        b = recv !b peer=1 -> p|P
        x = set_ !input/0 (<UntypedStorage>) -> blank
        sum x => r|R
    rank 1:
        put input/0 -> a|A
        b = set_ !input/1 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        index_put input/0 -> c|C

no tensor that differs within a pickled object: 1 outside set_
    through rank 1: aten.set_ -> recv #1 from rank 1 to rank 0 in group 0-1 -> rank 0
    rank 0:
        b = empty -> blank
        b = recv !b peer=1 -> p|P
        x = set_ !input/0 (<UntypedStorage>) -> blank
        sum x => r|R
    rank 1:
        put input/0 -> a
        b = set_ !input/1 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        index_put input/0 -> c|C

an object that its receiver alone uses, as an argument: 1 outside set_
    through rank 1: aten.set_ -> recv #1 from rank 1 to rank 0 in group 0-1 -> rank 0
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        x = mul input/0 (3 | 4) -> x|X
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        x = all_reduce !input/0 -> s|S
        sum x => r|R

an object that its receiver alone uses, as a tensor: 1 outside set_
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        mul input/0 other/n#0=n|N => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r

an object that its receiver alone uses, as a seed: 1 outside set_
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        rand rng=1|2 => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r

an object that its receiver alone uses, to decide: 1 outside set_
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        relu|gelu input/0 => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r

a seed that all take from one rank: 1 rng rand
    rank 0:
        b = broadcast !input/9=e root=1 -> p|P
        rand rng=1|2 => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = broadcast !b@p|P root=1 -> p|P
        rand rng=1|2 => r|R

a number in a tensor that its receiver alone reads: 1 outside mul
    rank 0:
        n = broadcast !input/9=e root=1 -> p|P
        _local_scalar_dense n scalar=3|4
        mul input/0 other/n#0=n|N => r|R
    rank 1:
        n = mul other/t=p|P -> p|P
        n = broadcast !n root=1 -> p|P
        relu input/0 => r

an object that is handed on: 2 outside set_
    through rank 2: aten.set_ -> recv #1 from rank 2 to rank 1 in group 0-1-2 -> rank 1; \
rank 1: recv #1 from rank 1 to rank 0 in group 0-1-2 -> rank 0
    rank 0:
        b = recv !input/9=e peer=1 -> q|Q
        mul input/0 (3 | 4) => r|R
    rank 1:
        b = recv !input/9=e peer=2 -> p|P
        c = set_ !input/5 (<UntypedStorage>) -> blank
        send c@q|Q peer=0
        relu input/0 => r
    rank 2:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=1
        relu input/0 => r

objects of two ranks, either of which the receiver may use: 1 outside set_ and 2 outside set_
    rank 0:
        b = recv !input/8=e peer=1 -> p|P
        c = recv !input/9=e peer=2 -> q|Q
        mul input/0 (3 | 4) => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r
    rank 2:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@q|Q peer=0
        relu input/0 => r

a value that a rank made before the object came: 0 outside mul
    rank 0:
        x = mul input/0 (3 | 4) -> x|X
        b = recv !input/9=e peer=1 -> p|P
        sum x => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r

times that all ranks exchange, in front of a value that one makes: 0 outside mul
    rank 0:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@q|Q -> g|G
        mul input/0 (3 | 4) => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@p|P -> g|G
        relu input/0 => r

times that all ranks exchange, in front of a seed that one makes: 0 rng rand
    rank 0:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@q|Q -> g|G
        rand rng=1|2 => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        b = all_gather !input/8 b@p|P -> g|G
        relu input/0 => r

a kernel on the receiver of an object: 0 kernel put
    rank 0:
        b = recv !input/9=e peer=1 -> p|P
        put input/0 => r|R
    rank 1:
        b = set_ !input/5 (<UntypedStorage>) -> blank
        send b@p|P peer=0
        relu input/0 => r

compiled code that reads parameters which another rank's has reached: 1 outside nothing
    through rank 1: aten.graph -> all_reduce #1 of group 0-1 -> rank 0
    unknown Compiled ran 2 times
    rank 0:
        y = graph input/0 opaque=compiled -> y
        g = all_reduce !y -> s|S
        p = add_ !parameter/w g -> p|P
        z = graph input/1 opaque=compiled -> z|Z
        mul p z => r|R
    rank 1:
        y = graph input/0=x opaque=compiled -> v|V
        g = all_reduce !y -> s|S
        p = add_ !parameter/w g -> p|P
        z = graph input/1 opaque=compiled -> u|U
        mul p z => r|R

what an op behind compiled code makes, and the next compiled code reads: 1 outside nothing
    through rank 1: aten.graph -> all_reduce #2 of group 0-1 -> rank 0
    unknown Compiled ran 2 times
    rank 0:
        y = graph input/0 opaque=compiled -> y
        g = all_reduce !y -> s
        z = graph input/1 opaque=compiled -> z
        g = all_reduce !z -> t|T
        sum g => r|R
    rank 1:
        y = graph input/0=x opaque=compiled -> v
        g = all_reduce !y -> s
        p = add_ !parameter/w g (2 | 3) -> p|P
        z = graph input/1 opaque=compiled -> u|U
        g = all_reduce !z -> t|T
        mul p g => r|R

two races, the later one on the lower rank: 1 kernel put later 0 kernel index_put
    through rank 1: aten.put -> all_reduce #1 of group 0-1 -> rank 0
    rank 0:
        x = all_reduce !input/0 -> s|S
        y = relu input/1 -> y
        z = index_put y -> z|Z
        v = mul x z -> v|V
        w = all_reduce !v -> w|W
        sum w => r|R
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        v = mul x -> v|V
        w = all_reduce !v -> w|W
        sum w => r|R

two races that no collective orders: 0 kernel index_put and 1 kernel put
    rank 0:
        x = index_put input/0 -> a|A
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a race in front of many collectives of other ranks is not behind them: 0 kernel index_put and 2 kernel put
    rank 0:
        x = all_reduce !input/0 group=0-1 -> s
        x = all_reduce !x group=0-1 -> t
        x = index_put x -> a|A
        sum x => r|R
    rank 1:
        x = all_reduce !input/0 group=0-1 -> s
        x = all_reduce !x group=0-1 -> t
        sum x => r
    rank 2:
        put input/0 => r|R

a barrier orders two races: 1 kernel put later 0 kernel index_put
    rank 0:
        barrier
        index_put input/0 => r|R
    rank 1:
        x = put input/0 -> b|B
        barrier
        sum x => r|R

a list that Python made behind data that differ: 1 kernel put
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
        index input/0 other/i=i|I => q|Q
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a list that Python made where nothing that differs had come: 1 kernel put later 0 outside index
    rank 0:
        barrier
        index input/0 other/i=i|I => q|Q
    rank 1:
        x = put input/0 -> b|B
        barrier
        sum x => r|R

of a broadcast only the root is waited for: 0 kernel index_put and 1 kernel put
    rank 0:
        x = broadcast !input/1 root=0 -> w
        index_put input/0 => r|R
    rank 1:
        y = put input/0 -> b|B
        x = broadcast !input/1 root=0 -> w
        sum y => r|R

a decision by a scalar that is broadcast: 1 kernel bincount
    rank 0:
        n = empty -> blank
        n = broadcast !n root=1 -> n|N
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R
    rank 1:
        n = bincount input/0 -> n|N
        n = broadcast !n root=1 -> n|N
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R

a number that ranks make of a mean of other data of one: 1 outside index
    rank 0:
        m = mean input/0 -> m
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (40) => R
    rank 1:
        x = index input/0 other/i=i|I -> b|B
        m = mean x -> m|M
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (40) => R

numbers that ranks make each in its way behind a mean of other data of one: 1 outside mul
    rank 0:
        m = mean input/0 -> m
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (40) => R
    rank 1:
        x = index input/0 other/i=i|I -> b|B
        m = mean x -> m|M
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (50) => R

a number that ranks make of a mean of other data of both: 0 outside mul and 1 outside mul
    rank 0:
        x = index input/0 other/j=j|J -> c|C
        m = mean x -> n|N
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (40) => R
    rank 1:
        x = index input/0 other/i=i|I -> b|B
        m = mean x -> m|M
        m = all_reduce !m -> s|S
        _local_scalar_dense m scalar=3|4
        1: mul input/0 (30) => r
        2: mul input/0 (40) => R

a decision by a kernel that is pickled: 1 kernel bincount
    rank 0:
        b = empty -> blank
        b = broadcast !b root=1 -> p|P
        relu|gelu input/0 => r|R
    rank 1:
        n = bincount input/0 -> n|N
        _local_scalar_dense n scalar=3|4
        b = set_ input/5 -> w
        b = broadcast !b@p|P root=1 -> p|P
        relu|gelu input/0 => r|R

a decision by the clock of a rank that is pickled: 1 sequence relu
    rank 0:
        b = empty -> blank
        b = broadcast !b root=1 -> p|P
        relu|gelu input/0 => r|R
    rank 1:
        b = set_ input/5 -> w
        b = broadcast !b@p|P root=1 -> p|P
        relu|gelu input/0 => r|R

a decision by the clock of a rank that is broadcast: 1 outside mul
    rank 0:
        n = broadcast !input/8 root=1 -> p|P
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R
    rank 1:
        n = mul other/t=p|P -> p|P
        n = broadcast !n root=1 -> p|P
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R

a bound of a rank, and the norm by which another one scales: 0 outside mul_
    rank 0:
        1: x = mul_ !input/0 (5) -> m
        2: x = mul_ !input/0 (6) -> M
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        x = all_reduce !input/0 -> s|S
        _local_scalar_dense x scalar=3|4
        1: mul_ !input/1 (7) => r
        2: mul_ !input/1 (8) => R

decisions of two ranks of their own beside numbers that all read: 0 sequence relu and 1 sequence relu
    rank 0:
        n = mul other/t=p|P -> p|P
        n = all_reduce !n -> n|N
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R
    rank 1:
        n = mul other/t=q|Q -> q|Q
        n = all_reduce !n -> n|N
        _local_scalar_dense n scalar=3|4
        relu|gelu input/0 => r|R
    rank 2:
        n = all_reduce !input/0 -> n|N
        relu input/0 => r

an op that makes a tensor outside torch of what another rank gave: 1 kernel put
    rank 0:
        x = all_reduce !input/0 -> s|S
        noise = div other/n#0=n|N -> m|M in=zoo.dither.default
        zoo.dither.default x inside=noise => r|R
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

an order of examples from an unseeded generator: 1 rng randperm
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        randperm -> p|P rng=g|G
        1: select input/0 (0, 3)
        2: select input/0 (0, 4)
        x = stack input/0+3|4 -> x|X
        x = all_reduce !x -> s|S
        sum x => r|R

an order of examples beside a kernel whose output nobody reads: 1 outside select
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        index_put input/0 -> p|P
        1: select input/0 (0, 3)
        2: select input/0 (0, 4)
        x = stack input/0+3|4 -> x|X
        x = all_reduce !x -> s|S
        sum x => r|R

ranks that meet others, as the clock of one of them decides: 2 outside c10d.allreduce_
    rank 0:
        b = empty -> blank
        b = broadcast !b root=2 -> p|P
        1: x = all_reduce !input/1 group=0-1 -> s
        2: x = all_reduce !input/1 group=0-2 -> t
        sum x => r|R
    rank 1:
        b = empty -> blank
        b = broadcast !b root=2 -> p|P
        1: x = all_reduce !input/1 group=0-1 -> s
        2: x = all_reduce !input/1 group=1-3 -> u
        sum x => r|R
    rank 2:
        b = set_ input/5 -> w
        b = broadcast !b@p|P root=2 -> p|P
        1: x = all_reduce !input/1 group=2-3 -> u
        2: x = all_reduce !input/1 group=0-2 -> t
        sum x => r|R
    rank 3:
        b = empty -> blank
        b = broadcast !b root=2 -> p|P
        1: x = all_reduce !input/1 group=2-3 -> u
        2: x = all_reduce !input/1 group=1-3 -> u
        sum x => q

another root, whose data agree, as the clock of a rank decides: 0 outside c10d.broadcast_
    rank 0:
        b = set_ input/5 -> w
        b = broadcast !b@p|P root=0 -> p|P
        1: x = broadcast !input/0 (0) root=0 -> v
        2: x = broadcast !input/0 (1) root=1 -> V
        sum x => r|R
    rank 1:
        b = empty -> blank
        b = broadcast !b root=0 -> p|P
        1: x = broadcast !input/0 (0) root=0 -> v
        2: x = broadcast !input/0 (1) root=1 -> V
        sum x => r|R

other data beside times that are gathered: 1 outside add
    rank 0:
        t = all_gather !input/8 other/t0=p|P -> t|T
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        t = all_gather !input/8 other/t1=q|Q -> t|T
        x = add other/batch#0=x|X -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

another op on one rank beside times that are gathered: 1 sequence relu
    rank 0:
        t = all_gather !input/8 other/t0=p|P -> t|T
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        t = all_gather !input/8 other/t1=q|Q -> t|T
        x = relu|gelu input/1 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a setting that changed on one rank: 1 settings sum
    rank 0:
        x = all_reduce !input/0 -> s|S
        sum x => r|R
    rank 1:
        mark start threads=1|2
        x = sum input/0 -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R

a result modified outside the dispatcher: 1 outside relu
    rank 0:
        relu input/0 => r
    rank 1:
        x = relu input/0 -> r
        result x a|b

ranks that run other ops from other seeds and batches: agree
    rank 0:
        x = dropout input/0=a rng=1 -> b
        x = all_reduce !x -> s
        y = sum x -> v
        result x s
    rank 1:
        x = dropout input/0=c rng=2 -> d
        x = relu x -> e
        x = all_reduce !x -> s
        result x s

an op that calls collectives differs by what it was given: 0 kernel put
    rank 0:
        x = put input/0 -> a|A
        y = all_reduce !x -> s|S in=zoo.sync.default
        y = zoo.sync.default x inside=y -> s|S
        sum y => r|R
    rank 1:
        x = relu input/0 -> b
        y = all_reduce !x -> s|S in=zoo.sync.default
        y = zoo.sync.default x inside=y -> s|S
        sum y => r|R

a collective that one run calls once more: 0 sequence c10d.allreduce_ and 1 sequence c10d.allreduce_
    rank 0:
        x = relu input/0 -> a
        x = all_reduce !x -> s
        2: x = all_reduce !x -> t
        sum x => r|R
    rank 1:
        x = relu input/0 -> b
        x = all_reduce !x -> s
        2: x = all_reduce !x -> t
        sum x => r|R

a collective that one run calls once more shifts the later ones: 0 kernel put
    rank 0:
        x = relu input/0 -> a
        2: n = exp input/1 -> n
        2: n = all_reduce_coalesced !n -> t
        x = put x -> b|B
        x = all_reduce !x -> s|S
        sum x => r|R
    rank 1:
        x = relu input/0 -> b
        2: n = exp input/1 -> n
        2: n = all_reduce_coalesced !n -> t
        x = all_reduce !x -> s|S
        sum x => r|R

contributions that were not hashed: 1 kernel put
    rank 0:
        x = relu input/0 -> a
        x = all_reduce !x@? -> s|S
        sum x => r|R
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x@? -> s|S
        sum x => r|R

a step that differs, and a later race in another step: 1 kernel put later 0 kernel index_put
    rank 0:
        x = all_reduce !input/0 -> s|S
        result x s|S as w
        step
        y = index_put input/1 -> y|Y
        x = mul x y -> z|Z
        result x z|Z as w
        step
    rank 1:
        x = put input/0 -> b|B
        x = all_reduce !x -> s|S
        result x s|S as w
        step
        x = relu x -> z|Z
        result x z|Z as w
        step
"""


class Case(NamedTuple):
    """A case of the table."""

    expected: str
    lines: str
    through: str | None
    unknown: str


def cases() -> dict[str, Case]:
    """The cases of the table by name."""
    found = {}
    for block in TABLE.replace("\\\n", "").strip().split("\n\n"):
        head, *lines = block.splitlines()
        name, _, expected = head.rpartition(": ")
        said = [line.strip() for line in lines if line.strip().startswith(("through", "unknown"))]
        through = next((line.removeprefix("through").strip() for line in said if line.startswith("through")), None)
        unknown = next((line.removeprefix("unknown ") for line in said if line.startswith("unknown")), "")
        found[name] = Case(expected, "\n".join(x for x in lines if x.strip() not in said), through, unknown)
    return found


CASES = cases()
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def word(one: RankDivergence) -> str:
    kernel = one.kernel.removeprefix("aten.").removesuffix(".default") or "nothing"
    return f"{one.rank} {one.origin} {kernel}"


def words(verdict: RanksVerdict) -> str:
    if not verdict.first:
        return "agree" if verdict.equal else "unknown"
    later = "".join(f" later {word(one)}" for one in verdict.later)
    return " and ".join(map(word, verdict.first)) + later


@every_case
def test_the_rank_and_the_kernel_are_named(case: Case) -> None:
    verdict = judge_ranks(case.lines)
    assert words(verdict) == case.expected
    assert case.unknown in " ".join(verdict.unknown)
    assert bool(case.unknown) == bool(verdict.unknown), verdict.unknown
    if case.through is not None:
        assert verdict.first[0].through == case.through
    assert not verdict.equal or case.expected == "agree"


def test_another_group_and_another_root_are_named_as_arguments() -> None:
    group, root = (
        next(case.lines for name, case in CASES.items() if name.startswith(start))
        for start in ("ranks that meet others", "another root")
    )
    (first,) = judge_ranks(group).first
    assert (first.first, first.second) == ("(#1 of group 2-3)", "(#1 of group 0-2)")
    assert first.detail.startswith("the process group, or the peer, of this call differs")
    (first,) = judge_ranks(root).first
    assert (first.first, first.second, first.detail) == (
        "(0)",
        "(1)",
        "a non-tensor argument differs",
    )


@every_case
def test_swapped_runs_name_the_same_rank(case: Case) -> None:
    there, back = judge_ranks(case.lines), judge_ranks(case.lines, swapped=True)
    assert [(one.rank, one.origin) for one in back.first] == [(one.rank, one.origin) for one in there.first]
    assert {one.rank for one in back.differing} == {one.rank for one in there.differing}


@every_case
@pytest.mark.parametrize("second", [False, True], ids=["the first run", "the second run"])
def test_a_run_on_ranks_never_differs_from_itself(case: Case, second: bool) -> None:
    traces = rank_traces(case.lines, second=second)
    verdict = find_across_ranks(traces, rank_traces(case.lines, second=second))
    assert (verdict.first, verdict.differing) == ((), ())


# ------------------------------------------------------------------------------------------ traces that end early

STEPS = """
rank 0:
    x = all_reduce !input/0 -> s|S
    result x s as w
    step
    {zero}
    x = relu x -> z|Z
    result x z|Z as w
    step
rank 1:
    x = put input/0 -> b|B
    x = all_reduce !x -> s|S
    result x s as w
    step
    {one}
    x = relu x -> z|Z
    result x z|Z as w
    step
"""


def cut(traces: Mapping[int, Trace], rank: int, steps: int, ended: str = "SIGKILL") -> Mapping[int, Trace]:
    """The traces with that of one rank as a dead process leaves it."""
    trace = cut_after(traces[rank], steps - 1) if steps else replace(traces[rank], records=(), steps=(), results=())
    return {**traces, rank: replace(trace, rank=TracedRank(rank, len(traces), ended))}


def test_a_rank_that_was_killed_is_judged_up_to_the_last_step_that_all_have() -> None:
    first, second = (rank_traces(STEPS.format(zero="", one=""), second=second) for second in (False, True))
    verdict = find_across_ranks(first, cut(second, 0, 1))
    assert (verdict.first, verdict.differing, verdict.steps) == ((), (), (0, 0))
    assert not verdict.equal
    assert verdict.benign == {0: 1, 1: 2}
    assert verdict.unknown == (
        "Rank 0 of the second run ended early after step 0: SIGKILL.",
        "Compared up to the end of step 0, the last that all ranks of both runs have whole.",
    )


DECIDED = """
rank 0:
    p = add_ !parameter/w input/0 -> a
    replica p a as w 0-1
    step
    v = all_reduce !input/1 -> v|V
    _local_scalar_dense v scalar=0|1
    1: p = add_ !p input/0 -> b
    1: replica p b as w 0-1
    1: step
rank 1:
    p = add_ !parameter/w input/0 -> a
    replica p a as w 0-1
    step
    v = put input/1 -> c|C
    v = all_reduce !v -> v|V
    _local_scalar_dense v scalar=0|1
    1: p = add_ !p input/0 -> b
    1: replica p b as w 0-1
    1: step
"""


@pytest.mark.parametrize("swapped", [False, True])
def test_runs_that_stop_at_another_step_are_compared_to_their_ends(swapped: bool) -> None:
    verdict = judge_ranks(DECIDED, swapped=swapped)
    assert [(one.rank, one.origin, one.kernel) for one in verdict.first] == [(1, "kernel", "aten.put.default")]
    assert [(one.rank, one.name, one.step) for one in verdict.differing] == [(0, "w", None), (1, "w", None)]
    assert (verdict.steps, verdict.unknown) == ((0, 1), ())


def test_ranks_may_make_other_numbers_of_steps_by_design() -> None:
    lines = STEPS.format(zero="", one="").rpartition("    x = relu")[0].replace("s|S", "s").replace("z|Z", "z")
    verdict = judge_ranks(lines.replace("b|B", "b"))
    assert (verdict.equal, verdict.steps, verdict.records) == (True, (0, 1), 4)


def test_a_window_of_steps_has_results_behind_its_last_one() -> None:
    traces = rank_traces(STEPS.format(zero="", one="").replace("|S", "").replace("|Z", "").replace("|B", ""))

    def moved(trace: Trace) -> Trace:
        steps = tuple(replace(step, number=step.number + 2) for step in trace.steps)
        return replace(trace, steps=steps, results=(*trace.results, replace(trace.results[0], name="loss")))

    window = {rank: moved(trace) for rank, trace in traces.items()}
    other = {rank: replace(trace, results=trace.results[:1]) for rank, trace in window.items()}
    verdict = find_across_ranks(window, other)
    assert [(one.rank, one.name, one.step) for one in verdict.differing] == [(0, "loss", None), (1, "loss", None)]


def test_a_rank_that_ended_before_its_first_step_leaves_nothing_to_compare() -> None:
    traces = rank_traces(STEPS.format(zero="", one=""))
    with pytest.raises(HashbenchError, match="no step is whole on all ranks of both runs: Rank 1 of the first run"):
        find_across_ranks(cut(traces, 1, 0), traces)


def test_a_run_without_steps_that_raised_is_compared_and_never_equal() -> None:
    traces = rank_traces("rank 0:\nrelu input/0 => r\nended ValueError\nrank 1:\nrelu input/0 => r")
    verdict = find_across_ranks(traces, traces)
    assert not verdict.equal
    assert verdict.unknown[0] == "Rank 0 of the first run ended early: ValueError."


def test_an_equal_run_says_what_was_compared() -> None:
    traces = rank_traces(STEPS.format(zero="", one=""))
    verdict = find_across_ranks(traces, rank_traces(STEPS.format(zero="", one="")))
    assert verdict.equal
    assert (verdict.ranks, verdict.records, verdict.steps, verdict.world_size) == ((0, 1), 5, (0, 1), 2)


def test_results_that_differ_are_told_with_their_first_step() -> None:
    lines = STEPS.format(zero="", one="").replace("result x s as w", "result x s|S as w", 1)
    verdict = judge_ranks(lines)
    assert [(one.rank, one.name, one.step) for one in verdict.differing] == [(0, "w", 0), (1, "w", 1)]


# ---------------------------------------------------------------------------------------------------- early reads

EARLY = """
rank 0:
    x = relu input/0 -> a
    x = all_reduce !x -> s
    {zero}
    sum x => r
rank 1:
    x = relu input/0 -> b
    x = all_reduce !x -> s
    y = neg x -> n
    {one}
    y = all_reduce !y -> s
    sum x => r
"""


def test_an_early_read_is_named_although_the_traces_agree() -> None:
    verdict = judge_ranks(EARLY.format(zero="", one="early neg"))
    assert words(verdict) == "1 unwaited neg"
    assert not verdict.equal
    assert verdict.first[0].source == "train.py:7 step"
    assert "waited" in verdict.first[0].detail


def test_an_early_read_in_one_run_is_named() -> None:
    assert words(judge_ranks(EARLY.format(zero="", one="2: early neg"))) == "1 unwaited neg"


def test_an_early_read_is_not_named_beside_a_difference() -> None:
    lines = EARLY.format(zero="", one="early neg").replace("sum x => r\n", "sum x => r|R\n", 1)
    assert words(judge_ranks(lines)) == "0 kernel sum"


# -------------------------------------------------------------------------------------------- what is not comparable


def test_other_numbers_of_ranks_are_refused() -> None:
    two = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r")
    three = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r\nrank 2:\nrelu input/0 => r")
    with pytest.raises(HashbenchError, match="the first run has 2 and the second run has 3"):
        find_across_ranks(two, three)
    with pytest.raises(HashbenchError, match="the program has 4 and the first run has 2"):
        find_across_ranks(two, two, world_size=4)


def test_a_trace_of_another_rank_is_refused() -> None:
    traces = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r")
    with pytest.raises(HashbenchError, match="the trace of rank 0 of the second run is that of rank 1"):
        find_across_ranks(traces, {0: traces[1], 1: traces[0]})


def test_other_tracers_are_refused() -> None:
    traces = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r")
    with pytest.raises(HashbenchError, match="tracer"):
        find_across_ranks(traces, {**traces, 1: replace(traces[1], tracer="native")})


def test_other_programs_are_refused() -> None:
    lines = "rank 0:\nrelu|gelu input/0 => r\nrank 1:\nneg|exp input/0 => r"
    with pytest.raises(HashbenchError, match="no op in common"):
        judge_ranks(lines)


def test_a_rank_of_another_program_is_said() -> None:
    verdict = judge_ranks("rank 0:\nrelu input/0 => r\nrank 1:\nneg|exp input/0 => r")
    assert verdict.unknown == ("Rank 1: its two traces have no op in common.",)
    assert not verdict.equal


def test_ranks_without_a_common_trace_are_refused() -> None:
    traces = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r")
    with pytest.raises(HashbenchError, match="no rank has a trace in both runs"):
        find_across_ranks({0: traces[0]}, {1: traces[1]})
    with pytest.raises(HashbenchError, match="no rank has a trace in both runs"):
        find_across_ranks({}, {})


def test_empty_traces_are_refused() -> None:
    with pytest.raises(HashbenchError, match="the traces are empty"):
        find_across_ranks({0: Trace(())}, {0: Trace(())})


def test_a_missing_rank_is_never_equal() -> None:
    traces = rank_traces("rank 0:\nrelu input/0 => r\nrank 1:\nrelu input/0 => r")
    verdict = find_across_ranks(traces, {0: traces[0]})
    assert not verdict.equal
    assert (verdict.missing, verdict.unknown) == ((1,), ("No trace of rank 1 in the second run.",))


def test_traces_of_a_plain_context_are_judged_by_all_records() -> None:
    traces = [
        {rank: replace(trace, rank=None, results=()) for rank, trace in rank_traces(lines).items()}
        for lines in (
            "rank 0:\nx = relu input/0 -> r\nrank 1:\nput input/0 -> p",
            "rank 0:\nx = relu input/0 -> r\nrank 1:\nput input/0 -> P",
        )
    ]
    assert words(find_across_ranks(*traces)) == "1 kernel put"


def random_ranks(rng: random.Random, *, noisy: int = -1, second: bool = False) -> tuple[Mapping[int, Trace], list[str]]:
    """Random programs of three ranks whose contents follow from what they read, and the rank and node of every op; in
    the second run, op ``noisy`` errs. Reductions, broadcasts, gathers and messages occur."""
    runs = {rank: RankRun(rank, 3, "", second=second) for rank in range(3)}
    content: dict[tuple[int, str], str] = {}
    alive: dict[int, list[str]] = {}
    for rank, run in runs.items():
        for number in range(2):
            run.write(f"input/{number}=x{rank}{number}")
            content[rank, f"input/{number}"] = f"x{rank}{number}"
        alive[rank] = ["input/0", "input/1"]
    ops: list[str] = []

    def made(rank: int, name: str, words: str, of: str) -> str:
        err = "?" * (second and len(ops) == noisy)
        content[rank, name] = hashlib.md5(of.encode()).hexdigest()[:12] + err
        runs[rank].write(f"{name} = {words} -> {content[rank, name]}")
        alive[rank].append(name)
        return content[rank, name]

    for number in range(30):
        kind = rng.choice(["mul", "mul", "mul", "round", "all_reduce", "broadcast", "all_gather", "send"])
        name, rank, other = f"n{number}", *rng.sample(range(3), 2)
        if kind in ("mul", "round"):
            one, two = rng.choice(alive[rank]), rng.choice(alive[rank])
            of = f"{number}" if kind == "round" else f"{content[rank, one]}|{content[rank, two]}"
            made(rank, name, f"{kind} {one} {two}" if kind == "mul" else f"round {one}", of)
            ops.append(f"{rank} {runs[rank].nodes[name]}")
            continue
        given = {one: rng.choice(alive[one]) for one in runs}
        if kind == "send":
            runs[rank].write(f"send {given[rank]} peer={other}")
            content[other, name] = content[rank, given[rank]]
            runs[other].write(f"{name} = recv !input/9{number}=e peer={rank} -> {content[other, name]}")
            alive[other].append(name)
            continue
        of = content[rank, given[rank]] if kind == "broadcast" else "+".join(content[one, given[one]] for one in runs)
        for one, run in runs.items():
            words = f"all_gather !input/9{number}=e {given[one]}" if kind == "all_gather" else f"{kind} !{given[one]}"
            words += f" root={rank}" if kind == "broadcast" else ""
            content[one, name] = hashlib.md5(of.encode()).hexdigest()[:12]
            run.write(f"{name} = {words} -> {content[one, name]}")
            if kind != "all_gather":
                alive[one].remove(given[one])
            alive[one].append(name)
            if len(alive[one]) < 2:
                made(one, f"m{number}", "fill input/0", f"{number}")
    for rank, run in runs.items():
        for number, name in enumerate(rng.sample(alive[rank], 2)):
            run.write(f"result {name} {content[rank, name]} as output.{number}")
    return {rank: run.trace() for rank, run in runs.items()}, ops


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_blame_the_rank_and_op_that_erred(seed: int) -> None:
    blamed = 0
    for noisy in range(0, 20, 2):
        first, ops = random_ranks(random.Random(seed), noisy=noisy)
        second, _ = random_ranks(random.Random(seed), noisy=noisy, second=True)
        verdict = find_across_ranks(first, second)
        differs = any(first[rank].results != second[rank].results for rank in first)
        assert bool(verdict.differing) == differs == (not verdict.equal)
        found = [f"{one.rank} {one.origin} {one.node}" for one in verdict.first]
        rank, _, node = ops[min(noisy, len(ops) - 1)].partition(" ")
        assert found == ([f"{rank} kernel {node}"] if differs else [])
        assert verdict.later == ()
        blamed += differs
    assert blamed


@pytest.mark.parametrize("seed", range(20))
def test_no_damaged_set_of_traces_agrees(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        traces, other = (random_ranks(random.Random(rng.randrange(1000)))[0] for _ in range(2))
        change = rng.choice(["drop", "swap", "foreign", "size", "ended"])
        rank = rng.randrange(3)
        changed = dict(traces)
        if change == "drop":
            del changed[rank]
        elif change == "swap":
            changed[rank] = traces[(rank + 1) % 3]
        elif change == "foreign":
            changed[rank] = other[rank]
        else:
            alone = TracedRank(rank, 4 if change == "size" else 3, "SIGTERM" if change == "ended" else "")
            changed[rank] = replace(traces[rank], rank=alone)
        try:
            verdict = find_across_ranks(traces, changed)
        except HashbenchError:
            continue
        assert not verdict.equal or changed == traces, change


def large(rank: int, *, second: bool) -> Trace:
    """20,000 records, of which every tenth is an all-reduce; the second run differs from record 9,205 of rank 5 on."""
    run = RankRun(rank, 8, "x = relu input/0 -> a", second=second)
    trace = run.trace()
    records: list[OpRecord] = []
    before = "input/0"
    for index in range(20_000):
        met = index % 10 == 9
        begin = 9_205 if rank == 5 else 9_209
        content = f"{'s' if met else rank}{index}{'!' * (second and index >= begin)}"
        op = "c10d.allreduce_.default" if met else f"aten.op{index % 10}.default"
        node = f"forward.{index // 1000}/net/{op}#{index % 1000}"
        known = records[-1].outputs[0].value if records else "w"
        ref = Ref("0", before, 0, met, known if met else "")
        collective = Collective("combine", tuple(range(8)), 0, ("0",)) if met else None
        output = TensorDigest("float32", (4,), (1,), content)
        records.append(
            OpRecord(node, "forward", index // 1000, "net", op, (ref,), outputs=(output,), collective=collective)
        )
        before = node
    return replace(trace, records=tuple(records), results=(Result("w", records[-1].outputs[0], before),))


@pytest.mark.slow
def test_eight_ranks_of_many_records_are_judged() -> None:
    first, second = ({rank: large(rank, second=second) for rank in range(8)} for second in (False, True))
    verdict = find_across_ranks(first, second)
    assert words(verdict) == "5 kernel op5"
    assert verdict.first[0].through == (
        "rank 5: aten.op5 -> all_reduce #921 of group 0-1-2-3-4-5-6-7 -> ranks 0, 1, 2, 3, 4, 6, 7"
    )
