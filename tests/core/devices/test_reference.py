"""The digest on devices: its definition, and that it sees what weaker sums do not."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import psutil
import pytest
import torch

from hashbench.core.devices import reference
from hashbench.core.devices.reference import GOLDEN, bytes_of, digest_of_bytes, finish, mix, signed

ALL_BITS = (1 << 64) - 1


def digest(data: torch.Tensor, **kwargs: int) -> int:
    total = torch.zeros(1, dtype=torch.int64)
    reference.accumulate(bytes_of(data), total, **kwargs)
    return finish(int(total), data.nbytes)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [*range(18), 63, 64, 65, 1000])
def test_torch_ops_compute_what_the_definition_says(count: int) -> None:
    data = noise(count)
    assert digest(data) == digest_of_bytes(bytes(data.tolist()))


def test_the_definition_stays_what_it_is() -> None:
    """Digests in stored traces stay comparable: whoever changes the formula must notice."""
    assert f"{digest_of_bytes(b''):016x} {digest_of_bytes(b'hashbench'):016x}" == "7de53de772ea694c f295a2ae24b360aa"


def test_size_of_the_pieces_changes_nothing() -> None:
    data = noise(1003)
    assert len({digest(data, words_at_once=words) for words in (1, 2, 7, 64, 1 << 20)}) == 1


@pytest.mark.parametrize("offset", range(9))
def test_address_changes_nothing(offset: int) -> None:
    data = noise(128)
    moved = torch.zeros(200, dtype=torch.uint8)
    moved[offset : offset + 128] = data
    assert digest(moved[offset : offset + 128]) == digest(data)


def test_every_single_bit_is_seen() -> None:
    data = noise(67)
    found = {digest(data)}
    for place, bit in itertools.product(range(67), range(8)):
        flipped = data.clone()
        flipped[place] ^= 1 << bit
        found.add(digest(flipped))
    assert len(found) == 1 + 67 * 8


@pytest.mark.slow
@pytest.mark.parametrize("bit", [0, 7, 31, 32, 52, 63], ids="bit {}".format)
def test_two_equal_changes_never_cancel(bit: int) -> None:
    """The sign of two numbers, the lowest bit of two numbers: what XOR sums and plain sums miss."""
    words = torch.randint(-(2**63), 2**63 - 1, (400,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    flip = signed(1 << bit)
    found = Counter([digest(words)])
    for first, second in random.Random(2).sample(list(itertools.combinations(range(400), 2)), 2000):
        changed = words.clone()
        changed[first] ^= flip
        changed[second] ^= flip
        found[digest(changed)] += 1
    assert len(found) == 2001


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_every_swap_of_two_elements_is_seen(dtype: torch.dtype) -> None:
    values = torch.arange(1, 61).to(dtype)
    found = {digest(values)}
    for first, second in itertools.combinations(range(60), 2):
        order = list(range(60))
        order[first], order[second] = second, first
        found.add(digest(values[order]))
    assert len(found) == 1 + 60 * 59 // 2


DIFFERENT = {
    "zeros of other lengths": [torch.zeros(count, dtype=torch.uint8) for count in range(100)],
    "a block repeated": [noise(64).repeat(times) for times in range(1, 40)],
    "rotations": [noise(96).roll(places) for places in range(96)],
    "signs of zero": [torch.tensor(zeros) for zeros in itertools.product([0.0, -0.0], repeat=6)],
    "payloads of NaN": [torch.tensor([payload | 0x7FF8 << 48]).view(torch.float64) for payload in range(100)],
    "one element among zeros": [torch.zeros(200).index_fill(0, torch.tensor([place]), 1.0) for place in range(200)],
    "small integers": list(torch.cartesian_prod(*[torch.arange(6)] * 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_content_has_different_digests(name: str) -> None:
    tensors = [tensor.contiguous().clone() for tensor in DIFFERENT[name]]
    assert len({digest(tensor) for tensor in tensors}) == len(tensors)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 4 << 30, reason="needs 4 GiB of memory")
def test_places_beyond_two_to_the_31_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2**31 + 11 bytes of zeros, one is changed in the last whole word and one after it. Without the scrambling,
    which takes most of the time, the sum is one of words combined with their places: it says exactly where."""
    monkeypatch.setattr(reference, "_mix", lambda words: words)
    data, totals = torch.zeros(2**31 + 11, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    data[2**31 + 5], data[2**31 + 9] = 7, 9
    reference.accumulate(data, totals, 0)
    words = 2**28 + 2
    of_zeros = GOLDEN * words * (words + 1) // 2  # each word is the key of its place
    keys = [(place + 1) * GOLDEN & ALL_BITS for place in (words - 2, words - 1)]
    expected = of_zeros + sum((key ^ word) - key for key, word in zip(keys, (7 << 40, 9 << 8), strict=True))
    assert (int(totals[0]) - expected) & ALL_BITS == 0


PATTERNS = {
    "a ramp": lambda: torch.arange(5000, dtype=torch.int32),
    "random numbers": lambda: torch.randn(4096, generator=torch.Generator().manual_seed(4)),
    "zeros": lambda: torch.zeros(4096),
    "one block again and again": lambda: noise(64).repeat(64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_permutations_of_blocks_are_seen(name: str) -> None:
    """Parts of any size change places: what a kernel that mixes up its tiles writes. Equal content stays equal."""
    whole, draw, seen = bytes_of(PATTERNS[name]()), random.Random(5), {}
    for size in (1, 4, 8, 16, 64, 512, 1024):
        blocks = list(whole.split(size))
        for _ in range(20):
            draw.shuffle(blocks)
            moved = torch.cat(blocks)
            seen[bytes(moved.tolist())] = digest(moved)
    assert len(set(seen.values())) == len(seen)


@pytest.mark.slow
def test_many_random_tensors_of_many_sizes_have_digests_of_their_own() -> None:
    """All 64 bits of 20 000 digests: a collision has a chance of 1e-11."""
    draw, generator = random.Random(6), torch.Generator().manual_seed(7)
    tensors = [
        torch.randint(0, 256, (draw.randrange(9, 300),), dtype=torch.uint8, generator=generator) for _ in range(20_000)
    ]
    assert len({digest(tensor) for tensor in tensors}) == len(tensors)


@pytest.mark.slow
def test_shortened_digests_collide_as_often_as_chance_has_it() -> None:
    """The birthday test: among n random tensors, n² / 2 / 2**32 pairs have the same 32 bits."""
    from scipy import stats  # 1 s to import, which no other file has to wait for

    count = 1 << 18
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**63), 2**63 - 1, (count, 3), dtype=torch.int64, generator=generator)
    totals = reference._mix(words ^ (torch.arange(1, 4) * signed(GOLDEN))).sum(1).tolist()
    digests = [finish(total, 24) for total in totals]
    for shift in (0, 16, 32):
        short = Counter(digest >> shift & 0xFFFFFFFF for digest in digests)
        pairs = sum(times * (times - 1) // 2 for times in short.values())
        expected = count**2 / 2 / 2**32
        assert stats.poisson.sf(pairs - 1, expected) > 1e-4, f"bits from {shift}"
        assert stats.poisson.cdf(pairs, expected) > 1e-4, f"bits from {shift}"


def test_each_bit_of_the_digest_follows_each_bit_of_the_content() -> None:
    """Of 64 bits, a flipped bit anywhere changes about half; none is changed always or never."""
    changed = Counter[int]()
    trials = 0
    for seed in range(40):
        data = noise(24, seed)
        before = digest(data)
        for bit in range(0, 192, 3):
            flipped = data.clone()
            flipped[bit // 8] ^= 1 << bit % 8
            difference = before ^ digest(flipped)
            changed.update(place for place in range(64) if difference >> place & 1)
            trials += 1
    assert all(0.44 < changed[place] / trials < 0.56 for place in range(64))


def test_mix_loses_nothing() -> None:
    words = {word << shift for word in range(1000) for shift in (0, 20, 40)}
    assert len(set(map(mix, words))) == len(words)
