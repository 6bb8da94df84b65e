"""The parts of a ``repro.py`` that do not depend on the call, as source text."""

from __future__ import annotations

DEFINING = """
definition = sys.argv[1] if len(sys.argv) > 1 else sys.exit("Say what defines the op; see the top of this file.")
if definition.endswith(".py"):
    runpy.run_path(definition)
elif definition.endswith(".so"):
    torch.ops.load_library(definition)
else:
    importlib.import_module(definition)
"""

PLACE = '''

def place(index, address, device="cpu", move=0):
    """Memory for the saved bytes of this index, at the address (modulo 64) that they had, moved by some bytes."""
    size = len(saved["memories"][index])
    if address == move == 0:
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    room = torch.empty(size + 256, dtype=torch.uint8, device=device)
    start = (address - room.data_ptr()) % 64 + move
    return room.untyped_storage()[start : start + size]


def view(memory, dtype, shape, stride, offset):
    """A tensor over this memory; stride and offset count elements."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)
'''

LEAVES_BEGIN = '''

def leaves(value):
    """The plain tensors in what an op takes or returns."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, (int, float, complex)):
        return [torch.tensor(value, dtype=torch.complex128)]
    if not isinstance(value, torch.Tensor):
        return []
'''

LEAVES_OF_OTHER_KINDS = """\
    if value.is_quantized:
        return [value.int_repr()]
    if value.is_nested:
        return leaves(value.unbind())
    if value.is_mkldnn:
        return [value.to_dense()]
"""

LEAVES_END = """\
    if value.layout is not torch.strided:
        return [value.to_sparse_coo()._indices(), value.to_sparse_coo()._values()]
    return [value.detach().resolve_conj().resolve_neg()]
"""

LOOKING = '''

def digest(outcome):
    """Over all bytes: it sees the sign of a zero, and equal NaNs are equal."""
    found = hashlib.sha256()
    for leaf in outcome:
        flat = leaf.cpu().contiguous()
        found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        found.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b"")
    return found.digest()


def distance(first, other):
    """The largest difference of two outcomes' values."""
    pairs = [(a, b) for a, b in zip(first, other) if a.shape == b.shape and a.numel()]
    gaps = [(a.to(torch.complex128) - b.to(torch.complex128)).abs() for a, b in pairs]
    return max((gap.nan_to_num(posinf=float("inf")).max().item() for gap in gaps), default=0.0)
'''

FILL_MALLOC = '''

def fill_memory(byte):
    """Have malloc fill all memory that it hands out with this byte (glibc's M_PERTURB); None: no more."""
    ctypes.CDLL(None).mallopt(-6, 0 if byte is None else byte ^ 0xFF)
'''

FILL_DEVICE = '''

def fill_memory(byte):
    """Leave this byte in memory that the device's allocator hands out next."""
    if byte is not None:
        [torch.full((1 << power,), byte, dtype=torch.uint8, device=@DEVICE@) for power in range(9, 29)]
'''

FILL_FREE_BLOCKS = '''

def fill_memory(byte):
    """Fill all blocks that torch's allocator holds free, out of which kernels get theirs, with this byte."""
    if byte is None:
        return
    sizes, most = [], 1 << 20  # a small segment serves no larger request, and a large one no smaller
    for segment in torch.@KIND@.memory_snapshot():
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            size = block["size"]
            if segment["device"] != torch.device(@DEVICE@).index or block["state"] != "inactive":
                continue
            sizes += [most] * (size // most) + [size % most] * (size % most > 0) if small else [size] * (size > most)
    sizes += [1 << 26] * (max(sizes, default=0) < 1 << 26)
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=@DEVICE@) for size in sorted(sizes, reverse=True)]
    del blocks
'''

BUSY = """\
enough = threading.Event()


def load():
    while not enough.is_set():
        torch.ones(256, 256) @ torch.ones(256, 256)
        sum(range(10_000))


m = memories()
first, others = call(m), (call(m) for _ in range(CALLS))
threads = [threading.Thread(target=load, daemon=True) for _ in range(os.cpu_count() or 1)]
for thread in threads:
    thread.start()
"""

BUSY_STREAM = """\
side = torch.Stream(@DEVICE@)
matrix, product = (torch.full((2048, 2048), 1 / 2048, device=@DEVICE@) for _ in range(2))
torch.accelerator.synchronize(@DEVICE@)


def beside_others(m):
    side.synchronize()  # no more than one call's share is queued
    with side:
        for _ in range(200):
            torch.mm(matrix, matrix, out=product)
    return call(m)


m = memories()
first, others = call(m), (beside_others(m) for _ in range(CALLS))
"""

STOP_STREAM = "side.synchronize()\n"

STOP_BUSY = """\
enough.set()
for thread in threads:
    thread.join()
"""

TRIALS = {
    "repeat": "m = memories()\nfirst, others = call(m), (call(m) for _ in range(CALLS))\n",
    "busy": BUSY,
    "busy_stream": BUSY_STREAM,
    "fresh_memory": (
        "kept = [memories() for _ in range(CALLS)]\nfirst, others = call(memories()), (call(m) for m in kept)\n"
    ),
    "moved": "first, others = call(memories()), (call(memories(moves)) for moves in MOVES)\n",
    "poison": "m = memories()\nfirst, others = call(m, 0x3F), (call(m, 0x40) for _ in range(CALLS))\n",
}
"""By experiment: the first outcome, and the others that are compared with it."""

COUNTING = """\
expected, done, differing, outcomes, largest = digest(first), 0, 0, {digest(first)}, 0.0
for other in others:
    found = digest(other)
    outcomes.add(found)
    done += 1
    differing += found != expected
    if found != expected and differing == 1:
        largest = distance(first, other)
    if differing and done >= 20:
        break
"""

RESULT = """\
print(
    f"{differing} of {done} calls differ from the first; {len(outcomes)} distinct outcomes; largest difference of two "
    f"{largest:.3g}; torch {torch.__version__}, {torch.get_num_threads()} threads"
)
sys.exit(1 if differing else 0)
"""
