"""From evidence to a cause, as a truth table over evidence written by hand. No torch here: the decision needs none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.catalog import CAUSES, EXPERIMENTS, Confidence, Origin, Role
from hashbench.core.diagnose.causes import decide
from hashbench.core.records import Evidence, ExperimentResult
from tests.core.diagnose.causes.evidence_helpers import (
    ALWAYS,
    EVERYWHERE,
    INSIDE,
    NEVER,
    PAIR,
    RARE,
    TWO_OUTCOMES,
    beginning,
    custom,
    kernel,
    seen,
    uncaptured,
)

DOCS = Path(__file__).parents[4] / "docs"
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("causes*.md")))


ACCUMULATION = {
    "accumulation_order proven": {
        "whole numbers and one thread both remove it": kernel(ALWAYS, "exact_values 0/20", "one_thread 0/20"),
        "whole numbers and the deterministic kernel both remove it, one thread cannot be tried on a GPU": kernel(
            ALWAYS, "exact_values 0/20", "one_thread (no thread of the CPU)", "deterministic 0/20"
        ),
        "a custom op whose partial sums one worker puts in order": custom(
            ALWAYS, "exact_values 0/20", "one_thread 20/20", "one_worker 0/20"
        ),
        "sums in 16 bits happen to be values of the inputs, and whole numbers remove the difference": kernel(
            ALWAYS, "exact_values 0/20", "one_thread 0/20", chosen_values=True
        ),
        "a custom op with threads that a constant entropy only steadies": custom(
            ALWAYS, "exact_values 0/20", "one_worker 0/20", "entropy 0/20"
        ),
        "no replay gave the record, but every replay gives something new": kernel(
            ALWAYS, "exact_values 0/20", "one_thread 0/20", matches_record=False
        ),
        "one in twenty, long arms": kernel(RARE, "exact_values 0/2000", "one_thread 0/2000"),
    },
    "accumulation_order likely": {
        "no replay gave the record, though outcomes come again": kernel(
            TWO_OUTCOMES, "exact_values 0/20", "one_thread 0/20", matches_record=False
        ),
        "one thread removes it, whole numbers were not tried": kernel(
            ALWAYS, "exact_values (budget)", "one_thread 0/20"
        ),
        "whole numbers remove it, and on a GPU the deterministic kernel raises": kernel(
            ALWAYS, "exact_values 0/20", "deterministic (raises: no deterministic implementation)"
        ),
        "whole numbers remove it, and on a GPU the deterministic kernel still differs": kernel(
            ALWAYS, "exact_values 0/20", "deterministic 20/20"
        ),
        "whole numbers remove it, in one thread it seems gone in too few replays": kernel(
            "repeat 6/20", "exact_values 0/40", "one_thread 0/20"
        ),
        "too few replays of each, not of both together": kernel(
            "repeat 20/53", "exact_values 0/8", "one_thread 0/8", "one_worker 0/8"
        ),
        "the deterministic flag removes it, and so does another library": kernel(
            ALWAYS, "exact_values 0/20", "deterministic 0/20", "cudnn_deterministic 0/20"
        ),
    },
    "unknown open": {
        "one in twenty, and no arm is long enough: it shows nothing": kernel(
            RARE, "exact_values 0/20", "one_thread 0/20", "deterministic 0/20"
        ),
        "all replays differ from the first and agree with each other: one odd outcome shows nothing": kernel(
            "repeat 20/20~2", "exact_values 0/20", "one_thread 0/20"
        ),
        "one thread removes it, but whole numbers still differ": kernel(
            ALWAYS, "exact_values 20/20", "one_thread 0/20"
        ),
        "whole numbers remove it, but one thread still differs": kernel(
            ALWAYS, "exact_values 0/20", "one_thread 20/20", "deterministic 20/20"
        ),
        "whole numbers make it rarer but not gone": kernel(ALWAYS, "exact_values 5/20", "one_thread 0/20"),
        "the deterministic flag alone removes it: a flag proves nothing": kernel(
            ALWAYS, "exact_values 20/20", "one_thread 20/20", "deterministic 0/20"
        ),
    },
}

RACES = {
    "write_race proven": {
        "values of the inputs, whole numbers still differ, one thread removes it": kernel(
            ALWAYS, "exact_values 20/20", "one_thread 0/20", chosen_values=True
        ),
        "the same with one worker, in a custom op": custom(
            ALWAYS, "exact_values 20/20", "one_worker 0/20", chosen_values=True
        ),
        "the last writer decides between 0.0 and -0.0": kernel(
            ALWAYS, "exact_values 20/20", "one_thread 0/20", chosen_values=True, representation="sign of zero"
        ),
    },
    "write_race likely": {
        "values of the inputs, one thread removes it, whole numbers were not tried": kernel(
            ALWAYS, "one_thread 0/20", chosen_values=True
        ),
        "values of the inputs, and the deterministic kernel raises on a GPU": kernel(
            ALWAYS, "exact_values 20/20", "deterministic (raises: none)", chosen_values=True
        ),
        "values of the inputs, in too few replays with one thread": kernel(
            RARE, "exact_values 1/20", "one_thread 0/20", chosen_values=True
        ),
    },
    "unknown open": {
        "values of the inputs, but one thread differs too": kernel(
            ALWAYS, "exact_values 20/20", "one_thread 20/20", chosen_values=True
        ),
        "values that no input has": kernel(ALWAYS, "exact_values 20/20", "one_thread 0/20", chosen_values=False),
    },
}

OVERLAPS = {
    "overlapping_views proven": {
        "copying the sources away removes it": kernel(ALWAYS, "copied_sources 0/20", "one_thread 0/20", overlap=True),
    },
    "overlapping_views likely": {
        "overlap, and copying the sources was not tried": kernel(
            ALWAYS, "one_thread 0/20", "exact_values 0/20", overlap=True
        ),
        "overlap, and copying the sources only makes it rarer": kernel(
            ALWAYS, "copied_sources 8/20", "one_thread 0/20", overlap=True
        ),
    },
    "accumulation_order proven": {
        "overlap, but it differs without it as well: the sum is to blame": kernel(
            ALWAYS, "copied_sources 20/20", "one_thread 0/20", "exact_values 0/20", overlap=True
        ),
    },
    "unknown open": {
        "overlap, but it differs in one thread": kernel(ALWAYS, "one_thread 20/20", overlap=True),
    },
    "alignment proven": {
        "overlap in a call whose replays agree": kernel(NEVER, "moved 12/18", overlap=True),
    },
}

ORDERS = {
    "unordered_output proven": {
        "the same values in different places": kernel(ALWAYS, "exact_values 20/20", same_values=True),
        "the same values in different places, which one worker puts in order": custom(
            ALWAYS, "exact_values 20/20", "one_worker 0/20", same_values=True, chosen_values=True
        ),
        "other places of equal values, of which whole numbers have more": kernel(
            ALWAYS, "exact_values 20/20", "deterministic (raises: none)", tied_places=True
        ),
    },
    "unordered_output likely": {
        "the same values in different places, but whole numbers remove it": kernel(
            ALWAYS, "exact_values 0/20", "one_thread 0/20", same_values=True
        ),
        "other places of equal values, and whole numbers were not tried": kernel(
            ALWAYS, "exact_values (budget)", tied_places=True
        ),
        "other places of equal values, but whole numbers remove it": kernel(
            ALWAYS, "exact_values 0/20", tied_places=True
        ),
    },
    "rng proven": {
        "the same values in different places, shuffled by a private generator": custom(
            ALWAYS, "generators 0/20 [models.shuffle.DRAW]", "one_worker 20/20", same_values=True
        ),
        "other places of equal values, drawn by a private generator": custom(
            ALWAYS, "generators 0/20 [models.ties.DRAW]", "exact_values 20/20", tied_places=True
        ),
    },
    "unknown open": {
        "other values": kernel(ALWAYS, "exact_values 20/20", same_values=False),
        "other places of other values": kernel(ALWAYS, "exact_values 20/20", tied_places=False),
    },
    "contention proven": {
        "other places of equal values in a call whose replays agree": kernel(
            NEVER, "busy_stream 9/20", tied_places=True
        ),
    },
}

MEMORY = {
    "uninitialized_memory proven": {
        "output follows the poison": kernel("repeat 12/20", "poison 20/20 [32 of 96 elements]"),
        "output follows the poison, replays agree by luck": kernel(
            NEVER, "poison 20/20 [32 of 96 elements]", "moved 12/18"
        ),
        "output follows the poison, and no replay gave the record": kernel(NEVER, "poison 20/20", matches_record=False),
        "an allocation whose poison reaches the results": kernel(
            "poison (an allocation)", "pair/poison 2/2", allocation=True
        ),
    },
    "uninitialized_memory likely": {
        "an allocation, poison not tried": kernel(PAIR, "pair/poison (a run failed)", allocation=True),
    },
    "opaque_producer likely": {
        "an allocation whose poison reaches nothing: something filled it unseen": kernel(
            PAIR, "pair/poison 0/2", allocation=True
        ),
    },
    "unknown open": {
        "the poison of the whole pair says nothing of an op that is no allocation": kernel(ALWAYS, "pair/poison 2/2"),
    },
}

PLACES = {
    "alignment proven": {
        "agrees in place, differs when moved": kernel(NEVER, "moved 12/18 [by 4, 8]"),
    },
    "alignment likely": {
        "agrees in place, differed once when moved": kernel(NEVER, "moved 1/18"),
        "agrees in place, differs in new memory, whatever that held before": kernel(
            NEVER, "moved 0/18", "poison 0/20", "fresh_memory 15/20"
        ),
        "agrees in place, differs when moved, and never gave the record": kernel(
            NEVER, "moved 12/18", matches_record=False
        ),
    },
    "unknown open": {
        "differs in new memory, which may not be written": kernel(NEVER, "moved 0/18", "fresh_memory 15/20", PAIR),
        "differs in place as well as moved": kernel(ALWAYS, "moved 18/18"),
        "differs rarely alone and rarely under load": kernel("repeat 8/200", "busy 1/20"),
        "differs often alone, always under load": kernel("repeat 8/20", "busy 20/20"),
        "differs alone as under load": kernel(ALWAYS, "busy 20/20"),
        "differs often alone, always beside a busy stream": kernel("repeat 8/20", "busy_stream 20/20"),
        "agrees beside a busy stream, too": kernel(NEVER, "busy_stream 0/20", PAIR),
        "agrees, and differs with another implementation of attention than the sweep's": kernel(
            NEVER, "sdpa_efficient 20/20", PAIR
        ),
    },
    "contention proven": {
        "agrees alone, differs under load": kernel(NEVER, "moved 0/18", "busy 9/20"),
        "agrees alone, differs beside a busy stream": kernel(NEVER, "busy_stream 20/20", "busy 0/20"),
        "agrees alone but for rare exceptions, differs under load": kernel("repeat 8/1876", "busy 20/20"),
        "differed once when moved, often under load": kernel(NEVER, "moved 1/18", "busy 20/20"),
    },
    "contention likely": {
        "agrees alone, differed once under load": kernel(NEVER, "busy 1/20"),
        "differed once beside a busy stream": kernel(NEVER, "busy_stream 1/20"),
    },
    "uninitialized_memory proven": {
        "differs beside a busy stream, because it reads what nobody wrote": kernel(
            NEVER, "poison 20/20 [all of 96 elements]", "busy_stream 20/20"
        ),
    },
    "unreproduced open": {
        "agrees, and differs with TF32, which the sweep had off": kernel(
            NEVER, "tf32_on 20/20", "cudnn_benchmark 20/20", "pair/pair 0/20"
        ),
    },
}

ALGORITHMS = {
    "algorithm_selection proven": {
        "clocks decide between two outcomes that agree on whole numbers": custom(
            TWO_OUTCOMES, "clocks 0/20", "exact_values 0/20", "one_thread 10/20"
        ),
    },
    "algorithm_selection likely": {
        "clocks decide between two outcomes": custom(TWO_OUTCOMES, "clocks 0/20", "exact_values 10/20"),
        "clocks decide between ever new outcomes that agree on whole numbers": custom(
            ALWAYS, "clocks 0/20", "exact_values 0/20", "one_thread 20/20"
        ),
        "clocks decide in the whole model, whose call could not be captured": uncaptured(
            "pair/pair 10/20~2", "pair/clocks 0/20"
        ),
        "gone without oneDNN": kernel(ALWAYS, "onednn_off 0/20"),
        "gone without cuDNN": kernel(ALWAYS, "cudnn_off 0/20"),
        "gone with cuDNN's deterministic algorithms: the algorithm or the choice of it": kernel(
            ALWAYS, "cudnn_deterministic 0/20", "cudnn_off 0/20"
        ),
        "worse while cuDNN tries algorithms out": kernel("repeat 2/20", "cudnn_benchmark 18/20"),
        "gone with TF32": kernel(ALWAYS, "tf32_on 0/20"),
        "gone with the math implementation of attention, not with the other implementations": kernel(
            ALWAYS, "exact_values 20/20", "sdpa_math 0/20", "sdpa_flash 20/20"
        ),
        "gone with cuDNN's attention": kernel(ALWAYS, "sdpa_math (raises: no kernel)", "sdpa_cudnn 0/20"),
        "gone with oneDNN's deterministic algorithms": kernel(ALWAYS, "onednn_deterministic 0/20"),
    },
    "outside_value proven": {
        "a clock's value among many, some of which come again": custom(
            "repeat 310/320~40", "clocks 0/20", "exact_values 310/320~40"
        ),
    },
    "unknown open": {
        "still there without oneDNN": kernel(ALWAYS, "onednn_off 20/20"),
        "rare, and gone without any of the libraries": kernel(RARE, "cudnn_off 0/20", "tf32_off 0/20"),
        "still there with each implementation of attention alone": kernel(
            ALWAYS, "sdpa_math 20/20", "sdpa_flash 20/20", "sdpa_efficient 20/20", "sdpa_cudnn (raises: no kernel)"
        ),
        "rare, and gone with every implementation of attention": kernel(
            RARE, *(f"sdpa_{name} 0/20" for name in ("math", "flash", "efficient", "cudnn"))
        ),
        "the backward of fused attention: the flag alone removes it": kernel(
            ALWAYS, "exact_values 20/20", "deterministic 0/20", "sdpa_math (calls no other op)"
        ),
        "no worse while cuDNN tries algorithms out": kernel("repeat 10/20", "cudnn_benchmark 12/20"),
    },
    "accumulation_order likely": {
        "sums by an algorithm of cuDNN's: gone with whole numbers, and with the other algorithm": kernel(
            ALWAYS,
            "exact_values 0/20",
            "deterministic 0/20",
            "cudnn_off 0/20",
            "cudnn_deterministic 0/20",
            "tf32_on 20/20",
        ),
    },
}

IN_CUSTOM_OPS = {
    "rng proven": {
        "a private generator inside": custom(ALWAYS, "generators 0/20 [models.noise.DRAW]"),
    },
    "rng likely": {
        "generators put back of which none had moved": custom(ALWAYS, "generators 0/20"),
    },
    "outside_value proven": {
        "entropy inside": custom(ALWAYS, "entropy 0/20 [os.urandom]"),
        "entropy that picks values of the inputs is no race": custom(
            ALWAYS, "entropy 0/20", "exact_values 20/20", "one_thread 20/20", chosen_values=True
        ),
        "a clock's value inside": custom(ALWAYS, "clocks 0/20", "exact_values 20/20"),
    },
    "outside_value likely": {
        "one in twenty, entropy seems to be it": custom(RARE, "entropy 0/20", "clocks 1/20"),
    },
    "opaque_kernel likely": {
        "one in twenty, and everything seems to remove it": custom(
            RARE, "entropy 0/20", "clocks 0/20", "generators 0/20"
        ),
        "no arm explains it": custom(
            ALWAYS, "one_worker 20/20", "entropy 20/20", PAIR, INSIDE, "process/fresh_process 3/3"
        ),
    },
    "call_order proven": {
        "threads that finish in any order": custom(ALWAYS, "one_worker 0/20", "exact_values 20/20"),
    },
    "surviving_state proven": {
        "a counter inside": custom(ALWAYS, PAIR, INSIDE, "process/fresh_process 0/3"),
        "a first call that differs, in every process": custom(
            NEVER, "pair/pair 0/20", INSIDE, "process/fresh_process 0/3"
        ),
        "only signs of zero differ, and a counter decides them": custom(
            ALWAYS, PAIR, INSIDE, "process/fresh_process 0/3", representation="sign of zero"
        ),
    },
    "surviving_state likely": {
        "a counter inside, two processes": custom(
            ALWAYS, PAIR, "process/within_process 2/2", "process/fresh_process 0/1"
        ),
    },
    "opaque_kernel open": {
        "nothing was tried": custom(),
    },
    "representation proven": {
        "no arm explains it, and only signs of zero differ": custom(
            ALWAYS, PAIR, INSIDE, "process/fresh_process 3/3", representation="sign of zero"
        ),
    },
    "representation likely": {
        "only signs of zero differ, with experiments still to come": custom(ALWAYS, representation="sign of zero"),
        "only signs of zero differ, fresh processes have other weights": custom(
            ALWAYS, PAIR, "process/fresh_process (its model has other weights)", representation="sign of zero"
        ),
    },
}

AROUND = {
    "unknown open": {
        "one of torch's own kernels differs in place, so state that survives is none of its business": kernel(
            ALWAYS, PAIR, INSIDE, "process/fresh_process 0/3"
        ),
        "not captured, one thread: sums or races, nobody knows": uncaptured(PAIR, "pair/one_thread 0/20"),
        "no experiment was made": seen("kernel"),
        "replays agree and the model was not run again": kernel(NEVER, "moved 0/18"),
    },
    "surviving_state proven": {
        "one of torch's own kernels agrees in place and the pair depends on the process": kernel(
            NEVER, PAIR, INSIDE, "process/fresh_process 0/3"
        ),
    },
    "rng proven": {
        "not captured, a private generator": uncaptured(PAIR, "pair/generators 0/20 [a.DRAW]"),
    },
    "outside_value proven": {
        "not captured, entropy": uncaptured(PAIR, "pair/entropy 0/20"),
    },
    "call_order proven": {
        "not captured, one worker": uncaptured(PAIR, "pair/one_worker 0/20"),
    },
    "representation likely": {
        "not captured, only bits differ": uncaptured(PAIR, representation="NaN payload"),
    },
    "opaque_producer likely": {
        "a copy differs from its source": seen("kernel", PAIR, opaque_producer=True),
    },
}

UNREPRODUCED = {
    "unreproduced open": {
        "a kernel, neither in replays nor in pairs": kernel(NEVER, "pair/pair 0/20"),
        "though without deterministic algorithms the kernel would differ": kernel(
            NEVER, "nondeterministic 20/20", "pair/pair 0/20"
        ),
        "a value from outside, never again in pairs": seen("outside", "pair/pair 0/20"),
        "once more while something is held still, which changes nothing": seen(
            "outside", "pair/pair 0/80", "pair/clocks 1/8", "pair/one_worker 0/8"
        ),
        "once more in a sequence that a value steered, with clocks held still": seen(
            "sequence", "pair/pair 0/80", "pair/clocks 1/8", steered=True, reordered=True
        ),
        "once more in replays with pools of one worker": custom(NEVER, "one_worker 1/20", "pair/pair 0/20"),
        "never again inside fresh processes": seen("state", "process/within_process 0/4"),
        "a generator, never again": seen("rng", "pair/pair 0/20"),
        "processes differ from each other, but none in itself": seen(
            "sequence",
            "pair/pair 0/20",
            "process/within_process 0/4",
            "process/fresh_process 3/3",
            "process/fixed_order 0/4",
        ),
        "an untraced pair that differed once": seen("", "pair/untraced 0/20", untraced="differ", first_pair=(0, 1)),
    },
    "outside_value open": {
        "far more often while a clock is held still than luck explains": seen(
            "outside", "pair/pair 0/80", "pair/clocks 4/8", "pair/one_worker 0/8"
        ),
        "once more in each of four arms, which luck does not explain": seen(
            "outside", "pair/pair 0/80", *(f"pair/{of} 1/8" for of in ("clocks", "entropy", "generators", "one_worker"))
        ),
        "once more as it was and once while something is held still": seen(
            "outside", "pair/pair 1/80", "pair/clocks 1/8", "pair/one_worker 0/8", "pair/entropy 0/8"
        ),
        "once more while something is held still, where the model was not run again as it was": seen(
            "outside", "pair/clocks 1/8", "process/within_process 0/4"
        ),
    },
    "contention likely": {
        "once more under load, which may bring a difference about": kernel(NEVER, "busy 1/20", "pair/pair 0/20"),
    },
    "surviving_state proven": {
        "first runs of a process only, which later pairs do not show": seen(
            "sequence", "pair/pair 0/20", INSIDE, "process/fresh_process 0/3"
        ),
    },
    "alignment proven": {
        "differs when moved, which is a reproduction": kernel(NEVER, "moved 12/18", "pair/pair 0/20"),
    },
    "global_settings proven": {
        "a setting is restored, so it cannot come again": seen("settings", "pair/pair 0/20"),
    },
}

MASKED = {
    "masked_by_tracing proven": {
        "untraced pairs differ, traced ones do not": seen(
            "", "pair/untraced 20/20", "pair/pair 0/20", untraced="differ", first_pair=(0, 1)
        ),
        "untraced pairs differ far more often than traced ones": seen(
            "", "pair/untraced 20/20", "pair/pair 2/20", untraced="differ", first_pair=(0, 1)
        ),
    },
    "masked_by_tracing likely": {
        "an untraced pair differs, nothing else was run": seen("", untraced="differ", first_pair=(0, 1)),
        "untraced pairs differ now and then": seen(
            "", "pair/untraced 2/20", "pair/pair 0/20", untraced="differ", first_pair=(0, 1)
        ),
    },
    "unknown open": {
        "traced pairs differ as often, the first was lucky": seen(
            "", "pair/untraced 8/20", "pair/pair 7/20", untraced="differ", first_pair=(0, 1)
        ),
    },
    "input_pipeline likely": {
        "traced runs differ too": seen("input", PAIR, untraced="differ"),
    },
}

OUTSIDE = {
    "input_pipeline proven": {
        "inputs differ unless entropy is constant": seen("input", PAIR, "pair/entropy 0/20"),
        "inputs differ unless entropy is constant, and fresh processes were tried, too": seen(
            "input", PAIR, "pair/entropy 0/20", INSIDE, "process/fresh_process 0/3"
        ),
        "inputs differ in fresh processes, too": seen("input", PAIR, INSIDE, "process/fresh_process 3/3"),
    },
    "input_pipeline likely": {
        "inputs differ, and fresh processes were not tried: an earlier run may be to blame": seen("input", PAIR),
    },
    "global_settings proven": {
        "a setting was changed": seen("settings"),
    },
    "other_ranks open": {
        "data of other processes": seen("ranks"),
        "whatever was tried in one rank": seen("ranks", PAIR, "pair/entropy 0/20"),
    },
    "rng likely": {
        "a generator's state differs, and neither putting all back nor anything else helps": seen(
            "rng", PAIR, "pair/generators 5/5", "pair/entropy 5/5", "pair/one_worker 5/5"
        ),
    },
    "rng proven": {
        "a generator's state differs": seen("rng", PAIR, "pair/generators 0/20 [noise.DRAW]"),
        "a generator's state differs, and it is seeded from entropy in every run": seen(
            "rng", PAIR, "pair/generators 20/20", "pair/entropy 0/20"
        ),
        "a value from a private generator": seen("outside", PAIR, "pair/generators 0/20 [a.DRAW]"),
        "a private generator, which a fresh process starts anew": seen(
            "outside", PAIR, "pair/generators 0/20 [a.DRAW]", INSIDE, "process/fresh_process 0/3"
        ),
    },
    "surviving_state proven": {
        "inputs, gone in fresh processes": seen("input", PAIR, INSIDE, "process/fresh_process 0/3"),
        "a generator, gone in fresh processes": seen(
            "rng", PAIR, "pair/generators 5/5", INSIDE, "process/fresh_process 0/3"
        ),
        "state, gone in fresh processes": seen("state", PAIR, INSIDE, "process/fresh_process 0/3"),
        "state that neither memory nor the collector changes": seen(
            "state", PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 20/20", "pair/poison 0/20"
        ),
        "a counter of the process": seen("outside", PAIR, INSIDE, "process/fresh_process 0/3"),
    },
    "surviving_state likely": {
        "state, gone in too few fresh processes": seen(
            "state", PAIR, "process/within_process 2/2", "process/fresh_process 0/1"
        ),
    },
    "initial_state proven": {
        "state, in fresh processes too": seen("state", PAIR, INSIDE, "process/fresh_process 3/3"),
    },
    "initial_state likely": {
        "state, fresh processes not tried": seen("state", PAIR),
        "state, fresh processes with other weights": seen(
            "state", PAIR, "process/fresh_process (its model has other weights)"
        ),
        "state, in fresh processes too unless their order is fixed: they may differ for a reason of their own": seen(
            "state", PAIR, INSIDE, "process/fresh_process 3/3", "process/fixed_order 0/4"
        ),
    },
    "external_mutation proven": {
        "memory modified outside the dispatcher": seen("outside", PAIR, opaque_producer=True),
        "memory modified outside the dispatcher by threads": seen(
            "outside", PAIR, "pair/one_worker 0/20", opaque_producer=True
        ),
        "memory modified outside the dispatcher from entropy": seen(
            "outside", PAIR, "pair/entropy 0/20", opaque_producer=True
        ),
    },
    "outside_value proven": {
        "a value from entropy": seen("outside", PAIR, "pair/generators 20/20", "pair/entropy 0/20"),
        "a value from a clock": seen("outside", PAIR, "pair/clocks 0/20"),
        "a clock between two values": seen("outside", "pair/pair 10/20~2", "pair/clocks 0/20"),
        "one in twenty, entropy in long arms": seen("outside", "pair/pair 6/119", "pair/entropy 0/140"),
        "inputs that follow addresses and hashes": seen(
            "input", PAIR, INSIDE, "process/fresh_process 3/3", "process/fixed_order 0/4"
        ),
        "addresses and hashes": seen("outside", PAIR, INSIDE, "process/fresh_process 3/3", "process/fixed_order 0/4"),
    },
    "call_order proven": {
        "threads that draw from one generator as they get to": seen(
            "rng", PAIR, "pair/generators 5/5", "pair/one_worker 0/20"
        ),
        "inputs made by threads as they finish": seen("input", PAIR, "pair/generators 5/5", "pair/one_worker 0/20"),
        "parameters made by threads as they finish": seen("state", PAIR, "pair/generators 5/5", "pair/one_worker 0/20"),
        "results of threads as they finish": seen("outside", PAIR, "pair/one_worker 0/20"),
        "threads that all start cold agree in first runs, and with one worker": seen(
            "outside", PAIR, "pair/one_worker 0/20", INSIDE, "process/fresh_process 0/3"
        ),
    },
    "garbage_collection proven": {
        "objects in cycles": seen("outside", PAIR, "pair/clocks 20/20", "pair/no_collector 0/20"),
        "objects in cycles, which the collector finds at one moment in all first runs": seen(
            "outside", PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 0/20"
        ),
        "inputs that follow what the collector has found": seen(
            "input", PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 0/20"
        ),
        "parameters that follow what the collector has found": seen(
            "state", PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 0/20"
        ),
        "a number of objects, read out, chooses the path": seen(
            "sequence", PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 0/20", steered=True
        ),
        "one of torch's kernels agrees in place, and the pair follows the collector": kernel(
            NEVER, PAIR, INSIDE, "process/fresh_process 0/3", "pair/no_collector 0/20"
        ),
    },
    "uninitialized_memory proven": {
        "memory of the C library, that earlier runs leave something in": seen(
            "outside", PAIR, INSIDE, "process/fresh_process 0/3", "pair/poison 20/20"
        ),
        "inputs from memory that nobody wrote": seen("input", PAIR, "pair/poison 20/20"),
        "parameters from memory that nobody wrote": seen(
            "state", PAIR, INSIDE, "process/fresh_process 0/3", "pair/poison 20/20"
        ),
        "a branch chosen by memory that nobody wrote": seen(
            "sequence", PAIR, INSIDE, "process/fresh_process 0/3", "pair/poison 20/20", steered=True
        ),
        "memory is read around a kernel that agrees in place": kernel(NEVER, PAIR, "pair/poison 20/20"),
    },
    "garbage_collection likely": {
        "one in twenty, without the collector in short arms": seen(
            "outside", "pair/pair 1/20", "pair/clocks 1/20", "pair/no_collector 0/20"
        ),
    },
    "outside_value open": {
        "nobody knows where from": seen("outside", PAIR, "pair/entropy 20/20", "pair/clocks 20/20"),
        "gone by itself, since nothing can be drawn from entropy and read from a clock": seen(
            "outside", PAIR, "pair/generators 0/20", "pair/entropy 0/20", "pair/clocks 0/20", "pair/one_worker 3/20"
        ),
        "one in twenty, and everything seems to remove it": seen(
            "outside", "pair/pair 1/20", "pair/entropy 0/20", "pair/generators 0/20 [a.DRAW]"
        ),
    },
    "outside_value likely": {
        "one in twenty, entropy in short arms": seen(
            "outside", "pair/pair 1/20", "pair/entropy 0/20", "pair/clocks 1/20"
        ),
    },
}

SEQUENCES = {
    "control_flow proven": {
        "a coin of a private generator, read out": seen(
            "sequence", PAIR, "pair/generators 0/20 [a.COIN]", steered=True
        ),
        "a clock, read out": seen("sequence", PAIR, "pair/clocks 0/20", steered=True),
        "entropy that was never a tensor": seen("sequence", PAIR, "pair/entropy 0/20"),
        "a counter of the process, read out": seen("sequence", PAIR, INSIDE, "process/fresh_process 0/3", steered=True),
    },
    "control_flow likely": {
        "a value read out, that nothing holds still": seen("sequence", PAIR, "pair/clocks 20/20", steered=True),
        "a value read out, and the difference gone by itself": seen(
            "sequence", PAIR, "pair/entropy 0/20", "pair/clocks 0/20", "pair/one_worker 0/20", steered=True
        ),
    },
    "surviving_state proven": {
        "a cache that is filled": seen("sequence", PAIR, INSIDE, "process/fresh_process 0/3"),
    },
    "call_order proven": {
        "threads as they finish": seen("sequence", PAIR, "pair/one_worker 0/20", reordered=True),
        "threads as they finish, and a value read out on the way": seen(
            "sequence", PAIR, "pair/one_worker 0/20", reordered=True, steered=True
        ),
        "a set in the order of addresses": seen(
            "sequence", PAIR, INSIDE, "process/fresh_process 3/3", "process/fixed_order 0/4", reordered=True
        ),
    },
    "call_order likely": {
        "a set in the order of addresses, one in two pairs of which agree": seen(
            "sequence",
            "pair/pair 10/20",
            "process/within_process 2/4",
            "process/fresh_process 2/3",
            "process/fixed_order 0/4",
        ),
        "the same ops in another order": seen("sequence", PAIR, "pair/one_worker 20/20", reordered=True),
    },
    "external_mutation proven": {
        "a thread that writes as often as it gets to": seen(
            "sequence", PAIR, "pair/one_worker 20/20", opaque_producer=True
        ),
    },
    "unknown open": {
        "other ops, and nothing explains it": seen("sequence", PAIR, "pair/entropy 20/20"),
        "other ops, nothing was tried": seen("sequence"),
        "processes differ from each other unless their order is fixed, and nobody looked inside one": seen(
            "sequence", "process/fresh_process 3/3", "process/fixed_order 0/4"
        ),
    },
}

ACROSS_RANKS = {
    "arrival_order proven": {
        "receives from fixed sources agree": seen("collective", "pair/pair 15/20", "pair/fixed_source 0/20"),
        "the collective alone differs": seen(
            "collective", PAIR, "pair/fixed_source 20/20", "collective/contributions 20/20", "collective/gloo 0/20"
        ),
    },
    "arrival_order likely": {
        "nothing was tried": seen("collective"),
        "too few runs to exclude luck": seen("collective", "pair/pair 1/20", "pair/fixed_source 0/20"),
        "the collective alone agrees": seen("collective", PAIR, "collective/contributions 0/20"),
    },
    "unwaited_read proven": {"the content changed after the read": seen("unwaited")},
    "unreduced_replica proven": {
        "no collective lies between": seen("kernel", replicas="unreduced", parameter="parameter.norm.weight"),
    },
    "rank_seed proven": {"other generator states": seen("rng", replicas="seed", parameter="parameter.head.weight")},
    "unknown open": {"an op differs between ranks": seen("kernel", replicas="op", parameter="parameter.0.weight")},
}

TABLE = [
    (name, evidence, *verdict.split())
    for section in (
        ACCUMULATION,
        RACES,
        OVERLAPS,
        ORDERS,
        MEMORY,
        PLACES,
        ALGORITHMS,
        IN_CUSTOM_OPS,
        AROUND,
        UNREPRODUCED,
        MASKED,
        OUTSIDE,
        SEQUENCES,
        ACROSS_RANKS,
    )
    for verdict, cases in section.items()
    for name, evidence in cases.items()
]

OF_ITEMS = {name for name, cause in CAUSES.items() if cause.batch}
"""What ``invariance/cause.py`` decides; ``tests/extensions/invariance`` has its table."""

OF_DATA = {name for name, cause in CAUSES.items() if cause.of_data}
"""What is decided of code that makes batches; ``tests/tools/pipeline`` has its table."""

OF_RUNS = set(CAUSES) - OF_DATA

REACHABLE = {
    "proven": OF_RUNS - {"opaque_kernel", "opaque_producer", "other_ranks", "unreproduced", "unknown"},
    "likely": OF_RUNS
    - {"external_mutation", "global_settings", "other_ranks", "unreproduced", "unknown"}
    - {"unwaited_read", "unreduced_replica", "rank_seed"},
    "open": {"outside_value", "opaque_kernel", "other_ranks", "unreproduced", "unknown"},
}
"""What the rules can answer: ``docs/causes.md`` says the same of each cause."""


@pytest.mark.parametrize(
    ("evidence", "cause", "confidence"), [row[1:] for row in TABLE], ids=[name for name, *_ in TABLE]
)
def test_the_cause(evidence: Evidence, cause: str, confidence: str) -> None:
    decision = decide(evidence)

    assert (decision.cause, decision.confidence) == (cause, confidence), decision.because
    assert decision.because
    assert any(beginning(remedy) in decision.advice.lower() for remedy in CAUSES[cause].remedies) or (
        decision.advice.startswith("No usual remedy makes it go away here (")
    )
    assert decision.advice.endswith(".")
    assert "{" not in decision.advice


@pytest.mark.parametrize("confidence", Confidence)
def test_the_table_has_every_cause_and_confidence(confidence: str) -> None:
    held = {row[2] for row in TABLE if row[3] == confidence}

    assert held == REACHABLE[confidence] - OF_ITEMS


def test_the_table_has_every_cause() -> None:
    assert {row[2] for row in TABLE} == OF_RUNS - OF_ITEMS


def test_a_rare_difference_proves_nothing_in_short_arms() -> None:
    """Whatever the facts are: 1 of 20, and 0 of 20 in every arm that could remove it."""
    arms = [
        f"{on}/{name} 0/20" for name, on in EVERYWHERE if on != "process" and EXPERIMENTS[name].role is not Role.BASE
    ]
    facts: Sequence[dict[str, bool]] = [{}, {"chosen_values": True}, {"overlap": True}, {"custom": True}]
    for known in facts:
        decision = decide(kernel("repeat 1/20", "pair/pair 1/20", *arms, **known))
        assert decision.confidence != "proven", decision
    for origin in ("outside", "sequence", "state"):
        assert decide(seen(origin, "pair/pair 1/20", *arms)).confidence != "proven"


def test_experiments_that_all_failed_prove_nothing() -> None:
    shown = Evidence(origin="rng", first_pair=(1, 1))
    failed = ExperimentResult("pair", "pair", note="a run failed: TypeError")
    assert decide(shown).confidence == "proven"
    assert decide(replace(shown, arms=(failed,))).confidence == "likely"


def test_no_evidence_explains_no_kernel() -> None:
    for origin in Origin:
        assert decide(Evidence(origin)).because
    assert decide(Evidence("kernel")).confidence == "open"


# --------------------------------------------------------------------------- advice, over evidence of every kind


# ------------------------------------------------------------------------------------------- where the time ended


# --------------------------------------------- sentences that the golden copy of this table (causes.txt) does not hold


def test_threads_that_write_behind_torchs_back_are_named() -> None:
    decided = decide(seen("outside", PAIR, "pair/one_worker 0/20", opaque_producer=True))
    assert "which threads of the model do" in decided.because
    assert "(threads of the model)" in decided.advice
    unknown = decide(seen("outside", PAIR, "pair/one_worker 20/20", opaque_producer=True))
    assert "threads of the model" not in unknown.because + unknown.advice


# ------------------------------------------------------------------------------------------------------ docs


def test_every_cause_has_its_section_in_the_docs() -> None:
    sections = re.findall(r"^### `(\w+)`$", PAGES, re.MULTILINE)

    assert sorted(sections) == sorted(OF_RUNS)


@pytest.mark.parametrize("cause", sorted(OF_RUNS))
def test_a_section_explains_shows_and_helps(cause: str) -> None:
    text = PAGES
    section = text.partition(f"### `{cause}`\n")[2].partition("\n### ")[0].partition("\n## ")[0]

    for part in ("**Evidence.**", "**Confidence.**", "**Real case.**", "**Remedy.**"):
        assert section.count(part) == 1, part
    said = section.partition("**Confidence.**")[2].partition("\n\n")[0]
    words = {word for word in Confidence if f"`{word}`" in said}
    assert words == {word for word in Confidence if cause in REACHABLE[word]}


def test_every_cause_of_data_has_its_line_in_the_docs() -> None:
    lines = re.findall(r"^\| `(\w+)` \|", (DOCS / "causes_data.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert lines == [name for name in CAUSES if name in OF_DATA]


def test_every_arm_has_its_line_in_the_docs() -> None:
    lines = re.findall(r"^\| `(\w+)/(\w+)` \|", PAGES, re.MULTILINE)

    assert sorted((name, on) for on, name in lines) == sorted(EVERYWHERE)
