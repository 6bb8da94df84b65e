"""Truth table of divergences: pairs of runs, and the origin, kernel and record that introduced the difference.

No torch here: the decision needs none.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hashbench.core.divergence import find
from hashbench.core.records import Verdict
from tests.core.divergence.runs import Run, full, judge

TABLE = """
model input differs: input at linear; node=input/0
    linear input/0=x|X parameter/Net.weight => y|Y

parameter differs: state at linear; node=parameter/Net.weight
    linear input/0=x parameter/Net.weight=w|W => y|Y

buffer differs: state at add; node=buffer/Net.mean
    add input/0=x buffer/Net.mean=b|B => y|Y

tensor from outside torch differs: outside at add; node=other/Net#0
    add input/0=x other/Net#0=o|O => y|Y

input comes before a parameter that differs too: input at linear
    linear parameter/Net.weight=w|W input/0=x|X => y|Y

parameter first read late comes before a kernel: state at mul; node=parameter/Net.weight
    y = index_put input/0=x -> y|Y
    mul y parameter/Net.weight=w|W => y|Y

input comes before settings: input at linear; node=input/0
    mark start threads=1|2
    linear input/0=x|X => y|Y

input that differs but reaches no result: kernel at add; node=forward.0/Net/aten.add.default#0
    input/1=x|X
    y = add input/0=x -> y|Y
    relu input/1 -> same
    result y y|Y

leaf changed between registration and first read: outside at add; node=buffer/Net.mean; opaque_producer=True
    x = relu input/0=x -> r
    buffer/Net.mean=b|B was=|b
    add x buffer/Net.mean => y|Y

leaf changed in both runs to something else: outside at add; node=buffer/Net.mean; opaque_producer=True
    buffer/Net.mean=b1|b2 was=b
    add buffer/Net.mean => y|Y

# ------------------------------------------------------------------------------------------ threads of the program's

a thread writes as often as it gets to: sequence at mul_; opaque_producer=True
    x = relu input/0=x -> r
    y = mul_ !x -> y thread=t0
    2: z = mul_ !y -> z thread=t0
    add y|z => v|V

a thread computes something else: sequence at neg; opaque_producer=False
    x = relu input/0=x -> r
    2: z = neg x -> z thread=t0
    add x|z => v|V

threads write to one tensor in another order: sequence at mul_; op_index=1; either_order=False
    x = relu input/0=x -> r
    1: y = mul_ !x (2) -> y thread=t0
    1: z = mul_ !y (3) -> z thread=t1
    2: y = mul_ !x (3) -> Y thread=t1
    2: z = mul_ !y (2) -> Z thread=t0
    add z => v|V

# ------------------------------------------------------------------------------------- inside an op that calls others

a tensor from outside torch enters inside an op: kernel at zoo.dither.default; op_index=1
    noise = div other/Net#0=n|N -> m|M in=zoo.dither.default
    zoo.dither.default input/0=x inside=noise => y|Y

what an op was given entered outside of it: outside at div
    noise = div other/Net#0=n|N -> m|M in=zoo.dither.default
    zoo.dither.default input/0=x other/Net#0 inside=noise => y|Y

an op calls others in another order: kernel at zoo.reduce.default
    a = sum input/0=x -> a in=zoo.reduce.default
    b = sum input/0=x -> b in=zoo.reduce.default
    c = add a|b b|a -> c|C in=zoo.reduce.default
    zoo.reduce.default input/0=x inside=c => y|Y

an op has an argument from elsewhere for another: kernel at zoo.anneal.default
    a = mul input/0=x (1 | 2) -> a|A in=zoo.anneal.default
    zoo.anneal.default input/0=x inside=a => y|Y

an op makes one call more: kernel at zoo.anneal.default
    a = relu input/0=x -> a in=zoo.anneal.default
    2: b = neg a -> b in=zoo.anneal.default
    zoo.anneal.default input/0=x inside=a|b => y|Y

an op that is itself called in one run only: sequence at relu; either_order=False
    1: a = relu input/0=x -> a in=zoo.extra.default
    1: b = zoo.extra.default input/0=x inside=a -> b
    2: b = neg input/0=x -> c
    add b => y|Y

a kernel inside an op: kernel at rand; inside=zoo.noisy.default
    a = rand -> a|A in=zoo.noisy.default
    zoo.noisy.default input/0=x inside=a => y|Y

an op calls more than in the other run, and so does the next: kernel at zoo.pool.default; op_index=3
    p = sin input/0=x -> p in=zoo.pool.default
    1: y = add p input/1=x -> z in=zoo.pool.default
    y = add p p -> y|Y in=zoo.pool.default
    zoo.pool.default input/0 inside=y
    q = sin y -> q|Q in=zoo.pool.default
    r = add q p -> r|R in=zoo.pool.default
    2: r = add r p -> r|R in=zoo.pool.default
    zoo.pool.default y inside=r => r|R

a setting is felt inside an op: settings at zoo.pool.default; op_index=1
    mark start threads=1|2
    y = pad input/0=x (0 | 2) -> y|Y in=zoo.pool.default
    zoo.pool.default input/0 inside=y => y|Y

a parameter is read first inside an op: state at add; inside=zoo.pool.default
    y = add input/0=x parameter/Net.weight=w|W -> y|Y in=zoo.pool.default
    zoo.pool.default input/0 inside=y => y|Y

an op draws from a generator of its own: kernel at zoo.noisy.default; inside=
    a = rand rng=2|3 -> a|A in=zoo.noisy.default
    zoo.noisy.default input/0=x inside=a rng=1 => y|Y

an op is called with the generator in another state: rng at rand; inside=zoo.noisy.default
    a = rand rng=1|2 -> a|A in=zoo.noisy.default
    zoo.noisy.default input/0=x inside=a rng=1|2 => y|Y

an op draws without effect, and computes otherwise: kernel at sum; inside=zoo.noisy.default; benign=1
    a = rand rng=1|2 -> a|A in=zoo.noisy.default
    b = sum input/0=x -> b|B in=zoo.noisy.default
    zoo.noisy.default input/0=x inside=b rng=1|2 => y|Y

of a seeded op inside another it is not known what the generator was before: rng at rand; inside=zoo.noisy.default
    a = rand rng=1|2 -> a|A in=zoo.noisy.default
    zoo.noisy.default input/0=x inside=a => y|Y

what an op reads was written behind its back before it was called: outside at relu
    hashed
    x = neg input/0=x@x -> m
    a = relu x@m|M -> a|A in=zoo.op.default
    zoo.op.default x@m|M inside=a@a|A => y|Y

# ---------------------------------------------------------------------------------------------------- settings

setting differs before a kernel: settings at sum; node=setting:threads
    mark start threads=2|1
    sum input/0 => y|Y

setting changed between two marks around a kernel: settings at sum; node=setting:threads
    mark start threads=2
    y = sum input/0 -> y|Y
    mark end threads=2|1
    result y y|Y

setting changed after the kernel that differed: kernel at index_put
    mark start threads=2
    y = index_put input/0 -> y|Y
    relu input/1 -> r
    mark step threads=2
    z = relu y -> y|Y
    mark end threads=2|1
    result z y|Y

setting that only one run has: settings at sum; node=setting:flag
    1: mark start threads=2
    2: mark start threads=2 flag=on
    sum input/0 => y|Y

# ----------------------------------------------------------------------------------------------------- kernels

kernel differs from equal inputs: kernel at index_put; op_index=1; module=Net.a; phase=backward; forward_op=f; source=a
    x = relu input/0 -> r
    y = index_put x -> y|Y module=Net.a phase=backward forward_op=f source=a
    sum y => y|Y

second output of a kernel differs: kernel at sort; detail=output 1 differs although every input is equal
    y = sort input/0 -> v,i|I
    gather y => y|Y

of two differences only one reaches a result: kernel at index_put; benign=1
    bincount input/0 -> y|Y
    index_put input/0 => y|Y

of two differences that both reach the first is blamed: kernel at index_put
    a = index_put input/0 -> y|Y
    b = put input/1 -> y|Y
    add a b => y|Y

difference that is rounded away is not blamed: kernel at put; benign=1
    a = index_put input/0 -> y|Y
    r = round a -> r
    put r => y|Y

difference that travels through in place ops: kernel at index_put_
    x = zeros -> 0
    x = index_put_ !x input/0 -> y|Y
    x = add_ !x -> y|Y
    mul_ !x => y|Y

difference overwritten in place is not blamed: kernel at put; benign=1
    x = index_put input/0 -> y|Y
    x = zero_ !x -> 0
    put x => y|Y

difference that stays beside an equal write into part of the tensor: kernel at index_put
    x = index_put input/0 -> a|A*8
    slice x (0, 0, 4)
    x = zero_ !x -> 0
    sum x => y|Y

difference written into part of a tensor: kernel at index_put_
    x = zeros -> 0*8
    slice x (0, 4, 8)
    x = index_put_ !x+4 -> a|A
    x = relu_ !x -> r
    sum x => y|Y

only the stride differs: kernel at sort; detail=the output has different strides although every input is equal; \
first=float32[4]:v stride [1]; second=float32[4]:v stride [2]
    sort input/0 => v~1|2

only the stride of an input differs: input at linear; node=input/0; \
detail=the model input input/0 has different strides before the first op; first=float32[4]:x stride [1]
    linear input/0=x~1|2 => y|Y

only the stride of a parameter differs: state at linear; node=parameter/Net.weight; \
detail=the parameter Net.weight has different strides before the first op; second=float32[4]:w stride [2]
    linear input/0 parameter/Net.weight=w~1|2 => y|Y

only the stride of an input differs, inputs hashed: input at linear; node=input/0
    hashed
    linear input/0=x~1|2@x => y|Y

only the stride that a kernel leaves differs, inputs hashed: kernel at sort; second=float32[4]:v stride [2]
    hashed
    v = sort input/0=x@x -> v~1|2
    mul v@v => y|Y

a kernel differs though its input has the same strides, inputs hashed: kernel at mul
    hashed
    v = sort input/0=x@x -> v~2
    mul v@v => y|Y

a copy into memory from outside that has different strides: outside at copy_; node=other/Net#0; opaque_producer=False; \
detail=a tensor that no recorded op wrote has different strides; first=float32[4]:g stride [1]
    x = relu input/0 -> r
    copy_ !other/Net#0=g~1|2 x => a|A~1|2

a result is written to memory from outside that has different strides: outside at mul; node=other/Net#0
    mul input/1 out=!other/Net#0=g~1|2 => a|A~1|2

a copy into memory of other content and equal strides: outside at copy_; opaque_producer=True; \
node=forward.0/Net/aten.copy_.default#0
    x = relu input/0 -> r
    copy_ !other/Net#0=g|G x => a|A

a copy with different strides: kernel at clone; detail=the output has different strides although every input is equal
    x = relu input/0 -> r
    clone x => a|A~1|2

only the dtype differs: kernel at to
    to input/0 => float32|int32:v

optimizer state differs and the loss does not: kernel at index_put
    g = index_put input/0 -> y|Y phase=backward
    state = _foreach_add_ !other/#0=m g -> m|M phase=optimizer
    loss = sum input/0 -> l
    result loss l as loss
    result state m|M as optimizer.exp_avg

result that differs beside one that only the second run has: kernel at index_put
    y = index_put input/0 => y|Y
    2: result y Y as extra

# ------------------------------------------------------------------------------------------------------ random

generator state differs: rng at native_dropout
    native_dropout input/0 => y|Y rng=g|G

generator state that changed nothing: kernel at sum
    y = native_dropout input/0 -> y rng=g|G
    sum y => y|Y

seeded op differs from an equal generator state: kernel at native_dropout
    native_dropout input/0 => y|Y rng=g

extra draw that shifts the generator for later ops: sequence at rand; benign=1
    2: rand -> n rng=g0
    x = bernoulli input/0 -> y|Y rng=g0|g1
    y = bernoulli input/0 -> y|Y rng=g1|g2
    relu x -> r
    result y y|Y

extra draw from another generator is not blamed: rng at bernoulli; benign=1
    2: rand -> n rng=private
    bernoulli input/0 => y|Y rng=g|G

numbers that no op read come before an argument behind them: rng at randperm; first=generator state g
    randperm rng=g|G -> p|P
    x = relu input/0 -> r
    select x (0, 1 | 0, 2)
    add x+1|2 => y|Y

numbers that no op read come before a tensor from outside: rng at randperm
    randperm rng=g|G -> p|P
    add input/0=x other/Net#0=o|O => y|Y

numbers that no op read come before another op: rng at randperm
    randperm rng=g|G -> p|P
    relu|gelu input/0 => y|Y

numbers that no op read, which an extra draw shifted: sequence at rand
    2: rand -> n rng=g0
    randperm rng=g0|g1 -> p|P
    mul input/0 (1 | 2) => y|Y

numbers that an op read: outside at mul; benign=2
    n = rand rng=g|G -> n|N
    abs n -> m|M
    mul input/0 (1 | 2) => y|Y

numbers that no op read and that are equal: outside at mul
    randperm rng=g|G -> p
    mul input/0 (1 | 2) => y|Y

numbers that were drawn after an argument: outside at mul; benign=1
    y = mul input/0 (1 | 2) -> y|Y
    randperm rng=g|G -> p|P
    result y y|Y

numbers that no op read before a write behind torch: outside at add; opaque_producer=True; benign=1
    hashed
    randperm rng=g|G -> p|P
    x = relu input/0@w -> r
    add x@r|R => y|Y

numbers that no op read before a kernel: kernel at put; benign=1
    randperm rng=g|G -> p|P
    put input/0 => y|Y

# ----------------------------------------------------------------------------------------------------- outside

argument that is not a tensor differs: outside at mul; first=(0.1); second=(0.2)
    mul input/0 (0.1 | 0.2) => y|Y

argument that changes nothing: kernel at index_put
    y = mul input/0 (0.1 | 0.2) -> y
    index_put y => y|Y

view is taken of another part: outside at slice; first=(0, 0, 2); second=(0, 2, 4)
    x = relu input/0 -> r
    slice x (0, 0, 2 | 0, 2, 4)
    sum x+0|2 => y|Y

view is taken in another order at the same offset: outside at permute
    x = relu input/0 -> r
    permute x ([0, 1] | [1, 0])
    mm x => y|Y

view is taken at another place where the same was read: kernel at mv; benign=1
    hashed
    slice buffer/Net.pool=p@p (0, 4 | 2, 6)
    filled = copy_ !buffer/Net.pool+0|2@a|b -> x
    slice filled@p1|p2 (0, 4 | 2, 6)
    mv filled+0|2@x => y|Y

view is taken at another place where something else was read: outside at slice
    hashed
    slice buffer/Net.pool=p@p (0, 4 | 2, 6)
    mv buffer/Net.pool+0|2@p1|p2 => y|Y

view of more of a tensor, inputs hashed: outside at slice; first=(0, 0, 2); second=(0, 0, 3)
    hashed
    x = relu input/0=x@x -> r
    slice x@r (0, 0, 2 | 0, 0, 3)
    sum x@p|q => y|Y

view of more of a tensor that was written since, inputs hashed: outside at slice; opaque_producer=False
    hashed
    x = relu input/0=x@x -> r
    slice x@r (0, 0, 2 | 0, 0, 3)
    x = add_ !x@r -> s
    sum x@p[2]|q[3] => y|Y

view in another order that shows the same bytes, inputs hashed: outside at permute
    hashed
    x = relu input/0=x@x -> r
    permute x@r ([0, 1] | [1, 0])
    mm x@r[2-2]|r[2-2]{1-2} => y|Y

view that is the same by other arguments, inputs hashed: kernel at mv
    hashed
    x = relu input/0=x@x -> r
    slice x@r (0, 0, 3 | 0, 0, 9)
    mv x@r[3] => y|Y

memory that is written behind torch beside a view that differs, inputs hashed: outside at mv; opaque_producer=True
    hashed
    x = relu input/0=x@x -> r
    slice x@r (0, 0, 3 | 0, 0, 2)
    mv x@r[3]|R[3] => y|Y

another output of one op, inputs hashed: sequence at mul; opaque_producer=False; \
detail=it reads a different output of one op than in the first run
    hashed
    x = aminmax input/0=x@x -> low,high
    mul x@low|high => y|Y

an output of several that is written behind torch: outside at mul; opaque_producer=True
    hashed
    x = aminmax input/0=x@x -> low,high
    mul x@low|odd => y|Y

view that differs of another tensor: kernel at index_put
    x = relu input/0 -> r
    z = relu input/1 -> z
    slice z (0, 0, 2 | 0, 2, 4)
    index_put x => y|Y

memory written behind torch before a read that was hashed: outside at linear; opaque_producer=True
    hashed
    x = relu input/0@w -> r
    linear x@r|R => y|Y

memory written behind torch after the last op: outside at relu; opaque_producer=True
    x = relu input/0 -> r
    result x y|Y

copy of equal memory differs so something wrote behind torch: outside at clone; opaque_producer=True
    x = relu input/0 -> r
    clone x => y|Y

copy onto its own source is a race and not a hidden write: kernel at copy_; opaque_producer=False
    x = relu input/0 -> r
    slice x (0, 1, 3)
    copy_ !x+1 x => y|Y

python result that no op returned: outside at relu; opaque_producer=False
    relu input/0 -> r
    result python 3|4

python result that an op returned: kernel at bincount
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    result python 3|4

result that only one run kept: outside at relu; opaque_producer=False
    x = relu input/0 -> r
    1: result x r as extra
    result x r

# ----------------------------------------------------------------------------------------- memory nobody wrote

blank memory is read: kernel at empty
    x = empty -> blank
    sum x => y|Y

blank memory is returned: kernel at empty
    x = empty -> blank
    result x g|G

blank memory is changed in place: kernel at empty
    x = empty -> blank
    add_ !x => y|Y

blank memory filled in part is read: kernel at empty
    x = empty -> blank*8
    slice x (0, 0, 4)
    x = copy_ !x input/0 -> c
    sum x => y|Y

blank memory filled in part is returned: kernel at empty
    x = empty -> blank*8
    slice x (0, 0, 4)
    x = copy_ !x input/0 -> c
    result x g|G*8

blank memory filled in two halves is not blamed: kernel at index_put
    x = empty -> blank*8
    x = copy_ !x input/0 -> c
    x = copy_ !x+4 input/1 -> d
    index_put x => y|Y

blank memory filled twice in the same half: kernel at empty
    x = empty -> blank*8
    x = copy_ !x input/0 -> c
    x = copy_ !x input/1 -> d
    sum x => y|Y

parts zeroed in another order before a kernel writes: kernel at index_put
    x = relu input/0 -> r*16
    x = zero_ !x+0|4 -> z*4|8
    x = zero_ !x+4|0 -> z*8|4
    y = index_put input/1 -> y|Y
    x = copy_ !x+12 y -> y|Y
    sum x => s|S

parts zeroed in another order and read between: sequence at zero_; benign=1
    x = relu input/0 -> r*16
    x = zero_ !x+0|4 -> z*4|8
    sum x => s|S
    x = zero_ !x+4|0 -> z*8|4

parts zeroed one by one keep nothing of what was there: kernel at index_put; benign=2
    x = zeros -> o*12
    x = div_ !x+0|4 -> d*4|8
    x = div_ !x+4|0 -> d*8|4
    x = zero_ !x -> z*4
    x = zero_ !x+4 -> z*8
    y = index_put input/1 -> y|Y
    x = copy_ !x+8 y -> y|Y
    sum x => s|S

parts zeroed one by one keep what is beside them: sequence at div_
    x = zeros -> o*16
    x = div_ !x+0|4 -> d*4|8
    x = div_ !x+4|0 -> d|e*8|4
    x = zero_ !x+4 -> z*4
    x = zero_ !x+8 -> z*4
    sum x => s|S

parts written in another order leave the same: kernel at sum; benign=2
    x = zeros -> o*16
    x = div_ !x+0|4 -> d*4|8
    x = div_ !x+4|0 -> d*8|4
    x = zero_ !x -> z*2
    sum x => s|S

parts zeroed in another order keep nothing of what was there: kernel at index_put; benign=2
    x = zeros -> o*12
    x = div_ !x+0|4 -> d*4|8
    x = div_ !x+4|0 -> d*8|4
    x = zero_ !x+0|4 -> z*4|8
    x = zero_ !x+4|0 -> z*8|4
    y = index_put input/1 -> y|Y
    x = copy_ !x+8 y -> y|Y
    sum x => s|S

another part zeroed: sequence at zero_
    x = relu input/0 -> r*16
    x = zero_ !x -> z*4
    x = zero_ !x+4|8 -> z*4
    sum x => s|S

memory that differs beside parts zeroed in another order: kernel at index_put
    x = index_put input/0 -> r|R*16
    x = zero_ !x+0|4 -> z*4|8
    x = zero_ !x+4|0 -> z*8|4
    sum x => s|S

kernel that fills blank memory given as out: kernel at bmm
    x = empty -> blank
    bmm input/0 out=!x => y|Y

custom op that fills blank memory: kernel at mylib.attention.default
    x = empty -> blank
    mylib.attention.default !x input/0 => y|Y

kernel that read equal memory filled in part: kernel at index_put
    hashed
    x = empty -> blank*8
    x = copy_ !x@g|G input/0@w -> c
    index_put x@c => y|Y

hashed read of memory filled in part: kernel at empty
    hashed
    x = empty -> blank*8
    x = copy_ !x@g|G input/0@w -> c
    sum x@cg|cG => y|Y

garbage in an auxiliary output is not blamed where inputs were hashed: kernel at put; benign=1
    hashed
    x = rnn input/0@w -> out,g|G
    put x@out => y|Y

kernel that fills blank memory whose garbage was hashed: kernel at bmm
    hashed
    x = empty -> blank
    bmm input/0@w out=!x@g|G => y|Y

hashed write beside a difference passes it on: kernel at index_put
    hashed
    x = index_put input/0@w -> a|A*8
    x = add_ !x@p -> q
    sum x@r|R => y|Y

memory of one run alone that is overwritten before it is read introduces nothing: kernel at index_put; benign=3
    2: x = empty -> blank
    2: x = uniform_ !x rng=g -> u
    y = index_put input/0 -> y|Y
    2: x = copy_ !x parameter/Net.weight=w -> w
    1: mul y parameter/Net.weight=w => z
    2: mul y x => Z

memory of one run alone that is overwritten in part: sequence at empty; benign=0
    2: x = empty -> blank*8
    2: x = copy_ !x parameter/Net.weight=w -> w
    1: sum parameter/Net.weight=w => s
    2: sum x => S

memory of one run alone that is overwritten: sequence at copy_; benign=1
    2: x = empty -> blank
    2: x = copy_ !x input/0 -> w
    1: sum parameter/Net.weight=v => s
    2: sum x => S

memory that differs and is overwritten by a copy that differs too: kernel at put; benign=1
    x = index_put input/0 -> a|A
    y = put input/1 -> y|Y
    copy_ !x y => y|Y

memory that differs and is overwritten, by a copy that differs by itself: kernel at fill_; benign=1
    x = index_put input/0 -> a|A
    fill_ !x => y|Y

memory that differs and is overwritten, inputs hashed: kernel at fill_; benign=1
    hashed
    x = index_put input/0@w -> a|A
    fill_ !x@a|A => y|Y

an input with other strides that is overwritten: input at copy_; node=input/1
    x = relu input/0 -> r
    copy_ !input/1=g~1|2 x => a|A~1|2

memory that differs and is overwritten in some places only: kernel at index_put
    x = index_put input/0 -> a|A
    y = put input/1 -> y|Y
    index_copy_ !x y => z|Z

random numbers in memory that nobody wrote: rng at uniform_
    x = empty -> blank
    uniform_ !x rng=g|G => y|Y

random numbers of an equal generator in memory that nobody wrote: kernel at uniform_
    x = empty -> blank
    uniform_ !x rng=g => y|Y

# ------------------------------------------------------------------------------------- another part of a memory

the same is written to another part: outside at select; first=(0, 0); second=(0, 1)
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    x = fill_ !x+0|3 -> f*3
    add x => y|Y

the same is written to another part, inputs hashed: outside at select; opaque_producer=False
    hashed
    x = zeros -> o*9
    select x@o (0, 0 | 0, 1)
    x = fill_ !x+0|3@p -> f*3
    add x@a|A => y|Y

memory of which another part is written is itself the result: outside at select; opaque_producer=False
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    x = fill_ !x+0|3 -> f*3
    result x y|Y*9

more of a memory is written: outside at slice
    hashed
    x = zeros -> o*9
    slice x@o (0, 0, 3 | 0, 0, 6)
    x = add_ !x@p|q -> f|g*3|6
    add x@a|A => y|Y

the same is written with other strides: outside at as_strided
    hashed
    x = zeros -> o*9
    as_strided x@o ([3], [1] | [3], [4])
    x = add_ !x@p -> f~1|4*3
    add x@a|A => y|Y

another part through a view of a view: outside at select; first=(0, 0); second=(0, 1)
    x = zeros -> o*27
    select x (0, 0 | 0, 1)
    select x+0|9 (0, 1)
    x = fill_ !x+3|12 -> f*3
    add x => y|Y

another part of a memory that was written since: outside at select
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    x = add_ !x -> p*9
    x = add_ !x+0|3 -> f*3
    x = mul_ !x+0|3 -> g*3
    add x => y|Y

another part of two tensors at once: outside at select
    x = zeros -> o*9
    w = zeros -> o*3
    select x (0, 0 | 0, 1)
    f = _foreach_add_ 0.0=!x+0|3 0.1=!w -> f*3,f*3
    add f => y|Y

another part by a view from before the trace: sequence at add_; first=offset 0 shape [3]; \
second=offset 3 shape [3]; detail=it writes to a different part of the memory than in the first run
    hashed
    x = add_ !other/Net#0+0|3@p -> f*3
    add x@a|A => y|Y

more by a view from before the trace: sequence at add_; first=offset 0 shape [3]; second=offset 0 shape [6]
    hashed
    x = add_ !other/Net#0@p|q -> f|g*3|6
    add x@a|A => y|Y

another row by a view from before the trace: sequence at add_; second=offset 0 shape [3] stride [3]
    x = add_ !other/Net#0 -> f~1|3*3
    add x => y|Y

another part chosen by a scalar: kernel at bincount
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=0|1
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    x = fill_ !x+0|3 -> f*3
    add x => y|Y

an op leaves what overlaps its target as a second output, alike in both runs: kernel at atan2_
    hashed
    x = clone input/0 -> o*9
    x = atan2_ !x@o x+3@p -> f|g*9,q*3
    add x@a|A => y|Y

the same is written to another part that nothing reads: kernel at put; benign=1
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    fill_ !x+0|3 -> f*3
    put input/0 => y|Y

the same is written to another part before what is read: kernel at put; benign=1
    x = zeros -> o*12
    select x (0, 0 | 0, 1)
    x = fill_ !x+0|3 -> f*3
    put x+9 => y|Y

memory written behind torch beside another part: outside at add; opaque_producer=True; benign=1
    hashed
    x = zeros -> o*12
    select x@o (0, 0 | 0, 1)
    x = fill_ !x+0|3@p -> f*3
    add x+9@r|R => y|Y

nothing is changed in another part: kernel at put
    hashed
    x = zeros -> o*9
    select x@o (0, 0 | 0, 1)
    x = fill_ !x+0|3@f -> f*3
    put x@o => y|Y

what is written in another part changes nothing, and memory is written behind torch: outside at add; \
opaque_producer=True
    hashed
    x = zeros -> o*9
    select x@o (0, 0 | 0, 1)
    x = fill_ !x+0|3@f -> f*3
    add x@r|R => y|Y

parts written in another order: kernel at put; benign=2
    x = zeros -> o*6
    select x (0, 0 | 0, 1)
    x = add_ !x+0|3 -> f*3
    select x (0, 1 | 0, 0)
    x = add_ !x+3|0 -> f*3
    put x => y|Y

columns written in another order: kernel at put; benign=2
    x = zeros -> o*4
    select x (1, 0 | 1, 1)
    x = add_ !x+0|1 -> f~2*2
    select x (1, 1 | 1, 0)
    x = add_ !x+1|0 -> f~2*2
    put x => y|Y

parts that overlap written in another order: outside at select
    x = zeros -> o*6
    select x (0, 0 | 0, 1)
    x = add_ !x+0|2 -> f|g*3
    select x (0, 1 | 0, 0)
    x = add_ !x+2|0 -> g|f*3
    sum x => y|Y

another part that is overwritten: kernel at put; benign=1
    x = zeros -> o*9
    select x (0, 0 | 0, 1)
    x = fill_ !x+0|3 -> f*3
    x = fill_ !x -> p*9
    put x => y|Y

# ---------------------------------------------------------------------------------------------------- sequence

op only in the second run at the beginning: sequence at relu
    2: x = relu input/0 -> r
    sum input/0|x => y|Y

op only in the first run in the middle: sequence at relu; op_index=1
    x = neg input/0 -> n
    1: x = relu x -> r
    sum x => y|Y

op only in the second run at the end: sequence at relu
    x = neg input/0 -> n
    2: x = relu x -> r
    result x n|r

one run goes on where the other ended: sequence at mul
    x = neg input/0 -> n
    2: x = mul x -> m
    2: x = sum x -> s
    2: result x s

another op comes next: sequence at relu; either_order=False
    relu|gelu input/0 => y|Y

an op in front of another call of the same op: sequence at relu; first=absent; either_order=False
    x = neg input/1 -> n
    2: a = relu input/0 (1) -> p
    2: x = add_ !x a -> m
    relu input/0 (2) -> r
    sum x => s|S

inputs of an op are swapped: sequence at sub; detail=it reads a different tensor than in the first run
    a = neg input/0 -> a
    b = exp input/0 -> b
    sub a|b b|a => y|Y

terms are added in another order: sequence at add_
    total = zeros -> 0
    input/0=a
    input/1=b
    total = add_ !total input/0|input/1 -> y|Y
    total = add_ !total input/1|input/0 -> ab|ba
    result total ab|ba

ops are reordered: sequence at neg; either_order=False
    x = neg|exp input/0=x -> n|e
    x = exp|neg x -> en|ne
    result x en|ne

harmless op inserted before the kernel: kernel at index_put; benign=1
    2: mean input/0 -> m
    x = relu input/0 -> r
    x = relu x -> r
    x = relu x -> r
    index_put x => y|Y

copy inserted in front of a reader of the kernel: kernel at index_put; benign=1
    x = relu input/0 -> r
    2: x = clone x -> r
    y = index_put input/0 -> y|Y
    add x y => y|Y

alias inserted in front of the kernel: kernel at index_put
    x = relu input/0 -> r
    2: detach x
    index_put x => y|Y

result is another part of what was written: outside at slice; opaque_producer=False; benign=0
    x = relu input/0 -> x
    slice x (0, 0, 2 | 0, 2, 4)
    result x a|b

result is a view that only one run takes: sequence at t; opaque_producer=False; benign=0
    x = relu input/0 -> x
    2: y = t x
    result x v|V

result is a part whose size was computed: kernel at bincount
    x = relu input/0 -> x
    n = bincount input/1 -> y|Y
    _local_scalar_dense n scalar=3|4
    slice x (0, 0, 3 | 0, 0, 4)
    result x v|V

result is modified outside the dispatcher beside a view that both runs take: outside at relu; opaque_producer=True
    x = relu input/0 -> x
    slice x (0, 0, 2)
    result x a|b

view that only one run takes: sequence at t
    x = relu input/0 -> r
    2: t x
    mm x => y|Y

view of another tensor: sequence at slice
    a = neg input/0 -> a
    b = exp input/0 -> b
    slice a|b (0, 0, 2)
    sum a|b => y|Y

# ------------------------------------------------------------------------------------------------- collectives

kernel in front of the first collective: kernel at index_put
    x = index_put input/0 -> y|Y
    x = c10d.allreduce_.default !x -> r|R
    sum x => s|S

collective whose inputs are equal: ranks at nothing; node=forward.0/Net/c10d.allreduce_.default#0
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> r|R
    sum x => s|S

collective in a group of one rank: kernel at c10d.allreduce_.default
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x group=0 -> r|R
    sum x => s|S

kernel behind a collective in a group of one rank: kernel at index_put; op_index=2
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x group=0 -> a
    index_put x => y|Y

argument behind a collective in a group of one rank: outside at mul
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x group=3 -> a
    mul input/1 (3 | 4) => y|Y

argument behind a collective in a group of two ranks: ranks at nothing
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x group=0-3 -> a
    mul input/1 (3 | 4) => y|Y

kernel that reads what a collective received: ranks at nothing; node=forward.0/Net/aten.index_put.default#0; op_index=3
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> a
    x = relu x -> b
    index_put x => y|Y

kernel that reads what a collective received, inputs hashed: ranks at nothing
    hashed
    x = relu input/0@w -> r
    x = c10d.allreduce_.default !x@r -> a
    index_put x@a => y|Y

kernel after a collective that reads nothing of it, inputs hashed: kernel at index_put
    hashed
    x = relu input/0@w -> r
    x = c10d.allreduce_.default !x@r -> a
    index_put input/1@w => y|Y

kernel after a collective that reads nothing of it, inputs not hashed: ranks at nothing
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> a
    index_put input/1 => y|Y

argument after a collective may be what was received: ranks at nothing
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> a
    mul input/1 (3 | 4) => y|Y

argument in front of a collective: outside at mul
    x = mul input/1 (3 | 4) -> y|Y
    c10d.allreduce_.default !x => a|A

argument of the first collective: outside at c10d.allreduce_.default
    x = relu input/0 -> r
    c10d.allreduce_.default !x (3 | 4) => a|A

kernel behind two collectives of which the last is equal: ranks at nothing; node=forward.0/Net/aten.put.default#0; \
first=float32[4]:y; second=float32[4]:Y
    x = relu input/0 -> r
    x = c10d.broadcast_.default !x -> a
    z = relu input/1 -> z
    z = c10d.allreduce_.default !z -> b
    put x => y|Y

memory that a collective received in part: ranks at nothing; node=forward.0/Net/aten.sum.default#0; first=float32[4]:y
    x = relu input/0 -> r
    o = empty -> blank*8
    o = c10d._allgather_base_.default !o x -> a
    sum o => y|Y

lists of lists that a collective fills: ranks at nothing; node=forward.0/Net/c10d.allgather_.default#0; op_index=2
    x = relu input/0 -> r
    o = empty -> blank
    o = c10d.allgather_.default !o x -> a|A
    sum o => y|Y

what a collective received is copied again: ranks at nothing; node=forward.0/Net/c10d._reduce_scatter_base_.default#0
    x = relu input/0 -> r
    c = clone x -> r
    o = empty -> blank
    o = c10d._reduce_scatter_base_.default !o x -> a|A
    o = copy_ !o c -> a|A
    sum o => y|Y

another op after a collective: ranks at nothing; steered_by=None
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> a
    _local_scalar_dense x scalar=3|4
    relu|gelu input/0 => y|Y

collective that only one run calls: sequence at c10d.allreduce_.default
    x = relu input/0 -> r
    2: x = c10d.allreduce_.default !x -> a
    result x r|a

tensor from outside torch that is read after a collective: ranks at nothing
    x = relu input/0 -> r
    x = c10d.allreduce_.default !x -> a
    add x other/Net#0=o|O => y|Y

blank memory that a collective fills: ranks at nothing
    x = relu input/0 -> r
    o = empty -> blank*8
    c10d._allgather_base_.default !o x => a|A*8

memory from outside that is only filled: kernel at index_put; benign=0
    x = index_put input/0 -> y|Y*4
    mul input/1 out=!other/Net#0=g|G -> m
    sum x => s|S

memory from outside that a collective fills: ranks at nothing
    x = relu input/0 -> r
    c10d._allgather_base_.default !other/Net#0=g|G x => a|A

memory from outside that an all-reduce reads: outside at c10d.allreduce_.default
    c10d.allreduce_.default !other/Net#0=g|G => a|A

memory from outside that is filled in part and read: outside at mul; node=other/Net#0
    x = mul input/1 out=!other/Net#0=g|G*8 -> m
    sum x => s|S

# ---------------------------------------------------------------------------------------------------- steering

scalar steers which op comes next: sequence at relu; steered_by=3 4 aten.bincount.default; either_order=False
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    relu|gelu input/1 => y|Y

scalar of a tensor that no op wrote: sequence at relu; steered_by=3 4 aten.lift_fresh.default; either_order=False
    lift_fresh other/#0=p|P
    _local_scalar_dense other/#0 scalar=3|4
    relu|gelu input/1 => y|Y

scalar that flows into an argument: kernel at bincount; steered_by=None
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    mul input/1 (3 | 4) => y|Y

scalar that flows into a slice: kernel at bincount
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    x = relu input/1 -> r
    slice x (0, 3, 8 | 0, 4, 8)
    sum x+3|4 => y|Y

scalar that flows into a list and a named argument: kernel at bincount; steered_by=None
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    pad input/1 ([0, 3], value=0.5 | [0, 4], value=0.5) => y|Y

scalar computed from an input that differs flows into an argument: input at sum
    n = sum input/0=x|X -> n|N
    _local_scalar_dense n scalar=3.5|4.5
    mul input/1 (3.5 | 4.5) => y|Y

scalar that was computed with before it became an argument: outside at mul; steered_by=3 4 aten.bincount.default; \
either_order=False
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    mul input/1 (6 | 8) => y|Y

scalar that was equal steers nothing: sequence at relu; steered_by=None; either_order=False
    n = sum input/0 -> n
    _local_scalar_dense n scalar=3
    relu|gelu input/0 => y|Y

scalar read after the sequence differed steers nothing: sequence at relu; steered_by=None; either_order=False
    y = relu|gelu input/0 -> y|Y
    n = bincount input/0 -> y|Y
    _local_scalar_dense n scalar=3|4
    result y r|g
"""
"""Runs as in ``tests/core/divergence/runs.py`` and their divergence: ``title: origin at kernel``, then fields of the
divergence, the number of ``benign`` records, and ``either_order=False`` where swapped runs blame another kernel."""


class Case(NamedTuple):
    """Two runs and what must be said of them."""

    lines: str
    origin: str
    kernel: str
    fields: dict[str, str]


def cases() -> dict[str, Case]:
    """The rows of the table by their titles."""
    read = {}
    for block in TABLE.strip().split("\n\n"):
        if not block.startswith("#"):
            header, _, lines = block.partition("\n")
            title, _, rest = header.partition(": ")
            blamed, *fields = rest.split("; ")
            origin, kernel = blamed.split(" at ")
            read[title] = Case(lines, origin, full(kernel), dict(field.split("=", 1) for field in fields))
    return read


CASES = cases()
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def said(verdict: Verdict, field: str) -> str:
    """A field of a divergence, or what is said of the verdict beside it, as the table writes it."""
    assert verdict.divergence is not None
    if field == "benign":
        return str(len(verdict.benign))
    steering = verdict.divergence.steered_by
    if field == "steered_by" and steering is not None:
        return f"{steering.first} {steering.second} {steering.kernel}"
    return str(getattr(verdict.divergence, field))


@every_case
def test_the_verdict_table(case: Case) -> None:
    verdict = judge(case.lines)
    assert verdict.divergence is not None, "no divergence was found"
    expected = {"origin": case.origin, "kernel": case.kernel, "benign": "0", **case.fields}
    expected.pop("either_order", None)
    assert {field: said(verdict, field) for field in expected} == expected


@every_case
def test_swapped_runs_get_the_same_verdict(case: Case) -> None:
    divergence = judge(case.lines, swapped=True).divergence
    assert divergence is not None
    assert divergence.origin == case.origin, divergence
    if case.fields.get("either_order") != "False":
        assert divergence.kernel == case.kernel, divergence


@every_case
@pytest.mark.parametrize("second", [False, True], ids=["the first run", "the second run"])
def test_a_run_never_differs_from_itself(case: Case, second: bool) -> None:
    trace = Run(case.lines, second=second).trace()
    verdict = find(trace, Run(case.lines, second=second).trace())
    assert (verdict.differing, verdict.divergence, verdict.benign) == ((), None, ())


def test_memory_that_is_only_filled_is_no_difference() -> None:
    assert judge("mul input/0 out=!other/Net#0=g|G -> m").divergence is None
    assert judge("c10d._allgather_base_.default !other/Net#0=g|G input/0 -> a").divergence is None


def test_a_collective_without_a_line_is_named() -> None:
    divergence = judge("x = relu input/0 -> r\nx = c10d.swap_.default !x -> a|A\nsum x => s|S").divergence
    assert divergence is not None
    assert divergence.origin == "ranks"
    assert divergence.detail.endswith(
        "; unknown collective c10d.swap_.default (not in hashbench/core/trace/collectives.csv)"
    )


RECEIVED = "x = relu input/0 -> r\nx = c10d.allreduce_.default !x -> "


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            RECEIVED + "a|A\nsum x => s|S",
            "c10d.allreduce_.default: received data differs although this rank contributed the same; "
            "no collective comes before it",
            id="a collective",
        ),
        pytest.param(
            "x = relu input/0 -> r\nx = c10d.allreduce_.default !x@d|D -> a|A\nsum x => s|S",
            "c10d.allreduce_.default: this rank's contribution differs, although whatever wrote it is equal; "
            "no collective comes before it",
            id="a collective that was given bytes from Python",
        ),
        pytest.param(
            RECEIVED + "a\nput x => y|Y",
            "aten.put.default: the output differs although every input is equal; the last collective before it, "
            "forward.0/Net/c10d.allreduce_.default#0, left the same in both runs",
            id="an op behind a collective that agrees",
        ),
        pytest.param(
            RECEIVED + "a|A\nput input/1 => y|Y",
            "aten.put.default: the output differs although every input is equal; the last collective before it, "
            "forward.0/Net/c10d.allreduce_.default#0, left different content in the two runs",
            id="an op beside a collective that differs",
        ),
        pytest.param(
            RECEIVED + "a\nmul input/1 (3 | 4) => y|Y",
            "aten.mul.default: a non-tensor argument differs; the last collective before it, "
            "forward.0/Net/c10d.allreduce_.default#0, left the same in both runs",
            id="an argument",
        ),
        pytest.param(
            RECEIVED + "a\nadd x other/Net#0=o|O => y|Y",
            "other/Net#0: a tensor that no recorded op wrote has different content; the last collective before it, "
            "forward.0/Net/c10d.allreduce_.default#0, left the same in both runs",
            id="a leaf",
        ),
    ],
)
def test_a_verdict_across_ranks_names_the_last_collective(lines: str, expected: str) -> None:
    divergence = judge(lines).divergence
    assert divergence is not None
    assert divergence.detail == (
        f"not traceable across ranks: {expected}. Compare the two traces of each rank, and look first at a rank whose "
        "verdict names no collective"
    )
    node = divergence.node
    assert node in ("other/Net#0", f"forward.0/Net/{expected.partition(':')[0]}#0")
