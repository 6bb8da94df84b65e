"""Causes are inferred from controlled experiments: which mechanism they show, how surely, and what is to be done.

Pure: imports no torch, reads no files. Three principles keep the rules sound. An experiment *removes* a difference only
if nothing differs under it and Fisher's exact test excludes luck (``stats.effect_of``); one that merely seems to
supports at most ``likely``, and only where no rival seems to as well. What was seen to happen (output depends on
uninitialised memory) needs no such test. And a change that makes a difference go away proves no mechanism where it
changes several things at once: another library, a flag.
"""

from hashbench.causes.evidence import cut_short, with_more_time
from hashbench.causes.rules import decide

__all__ = ["cut_short", "decide", "with_more_time"]
