"""``python -m hashbench``."""

import sys

from hashbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
