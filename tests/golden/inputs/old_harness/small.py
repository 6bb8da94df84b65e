"""A suite of that harness."""

from common import BenchmarkRunner


class SmallRunner(BenchmarkRunner):
    pass
