"""Batch invariance: whether an item's result depends on what else is in its batch, and which kernel made it so.

A run of the full batch is compared with one of a part of its items, call by call:

* Layout (``layout``): a dimension whose size follows the batch depends on it; where several indices belong to an item
  (``batch * heads``), all layouts that the sizes allow are tried by content.
* Row digests (``rows``) cover all that a call reads, through whatever view, and all that it writes.
* Rows without a fixed place (gathered, sorted, ragged) are matched by content (``match``), where most rows are
  unique.
* The origin (``finding``) is a call that read equal rows and wrote others (``RowEffect.ORIGIN``). If the layout of
  its outputs is unknown, it is *not attributable*: counted, never blamed. Reductions over the batch count only where
  they reach an output.
* Experiments (``experiments``, ``item_call``) replace the other items of the call's batch; where these show nothing,
  the calls of both runs are replayed as recorded (``call_pair``), or whole runs are made (``neighbours``). ``driver``
  runs each.
"""
