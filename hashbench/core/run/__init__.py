"""One run of a model: workload, random state, settings, environment, results."""
