"""A harness that lacks what is needed."""


class BenchmarkRunner:
    def run_n_iterations(self, model, inputs):
        raise NotImplementedError
