"""As much of PyTorch's benchmarks/dynamo/common.py as hashbench looks for. It is read and never run."""


class BenchmarkRunner:
    def run_n_iterations(self, model, inputs):
        raise NotImplementedError

    def deepcopy_and_maybe_parallelize(self, model):
        raise NotImplementedError

    def init_optimizer(self, name, device, params):
        raise NotImplementedError

    def pick_grad(self, name, is_training):
        raise NotImplementedError

    def check_accuracy(self, model, inputs, reset_rng_state, clone_inputs, same):
        results = []
        reset_rng_state()
        results.append(self.run_n_iterations(model, clone_inputs(inputs)))
        reset_rng_state()
        results.append(self.run_n_iterations(model, clone_inputs(inputs)))
        reset_rng_state()
        return same(*results)
