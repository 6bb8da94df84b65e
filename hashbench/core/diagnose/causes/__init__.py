"""Infer causes from controlled experiments: the mechanism, the confidence in it, and the advice.

Pure: imports no torch, reads no files. Three principles keep the rules sound. An experiment *removes* a difference only
if nothing differs under it and Fisher's exact test excludes chance (``stats.effect_of``); one that merely seems to
supports at most ``likely``, and only if no other experiment seems to as well. A direct observation (output follows the
content of uninitialised memory) needs no such test. And a change that makes a difference go away proves no mechanism
if it changes several things at once: another library, a flag.
"""

from hashbench.core.diagnose.causes.evidence import cut_short, with_more_time
from hashbench.core.diagnose.causes.rules import decide

__all__ = ["cut_short", "decide", "with_more_time"]
