"""Why the runs of a model differ: the experiments on it and on a captured call, and what follows from them."""
