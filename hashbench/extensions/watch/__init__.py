"""Step digests of training loops: cheap enough to leave on, comparable between runs.

``watch`` (``recorder``) hooks a model and the optimizers of its parameters. Each optimizer step becomes one line of
``FOLDER/rank0.jsonl`` (``file``): digests of the *parts* of the step, in the order in which a step meets them
(:data:`~hashbench.extensions.watch.file.PARTS`). Parts that are small are read in every step, tensors of the model in
turn, each once in ``every`` steps (``rotation``). ``compare`` finds the first step and part that differ between two
recordings, ``traced`` joins ranks and traces of steps to one verdict, ``resume`` finds what a resumed run did not
restore, ``rerun`` makes the runs for that, ``text`` says it.

Rules:

1. Nothing is changed by looking: no random number is drawn, no result changed. Lines are written once a second: an
   accelerator is synchronized then, and not in every step.
2. Absent is never equal: a part is compared where both runs read it, and a verdict says what was not read since when.
3. No kernel is named from digests: steps are traced for that (``HASHBENCH_TRACE_STEP``), and judged as by ``diff``.
4. A line holds its own checksum: a killed run leaves whole lines.
"""
