"""Write all golden files anew: ``python -m tests.golden``, or only those named after it."""

import sys

from tests.golden import torch_producers  # noqa: F401 – registers what it makes
from tests.golden.producers import PRODUCERS
from tests.golden.stage import EXPECTED, made

if __name__ == "__main__":
    names = sys.argv[1:] or list(PRODUCERS)
    for name in names:
        (EXPECTED / name).write_text(made(PRODUCERS[name]), encoding="utf-8", newline="")
    if not sys.argv[1:]:
        for path in sorted(EXPECTED.iterdir()):
            if path.name not in PRODUCERS:
                path.unlink()
    print(f"{len(names)} golden files in {EXPECTED}")
