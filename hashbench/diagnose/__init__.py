"""Why the runs of a model differ: the experiments (``driver``), and what each part of them does.

``driver`` decides what is run; ``pairs`` runs the whole model under one change at a time, ``fresh_process`` in fresh
processes, and ``patching`` gets past a difference that is known. The captured call is repeated by ``hashbench.replay``,
the decision is that of ``hashbench.causes``.
"""
