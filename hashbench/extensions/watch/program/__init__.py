"""``hashbench run``: run an unchanged program several times, and say whether all runs did the same.

``launch`` starts a run in a fresh process, ``child`` is what happens there: the script runs as ``__main__`` while the
step recorder of the core traces its first steps and ``watch`` writes digests of all. ``compare`` reads two runs,
``looks`` decides which further runs are needed (a traced look at the step that differs, a pair with fixed clocks, the
replay of a call), ``text`` says the verdict.

Rules:

1. The program is unchanged: torch is imported when the program imports it, and what it prints goes where it went.
2. Every run is a fresh process: what is drawn at import, hash seeds included, may differ, and is found.
3. Whether a printed line shows a clock is decided by two more runs with fixed clocks, and not by its words.
4. No kernel is named without a record of it: a difference that no traced pair of runs shows again is said to be so.
"""
