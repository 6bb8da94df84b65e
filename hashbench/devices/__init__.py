"""Digests that are made where the tensor lives.

On an accelerator, a copy to the host would make the program wait for every op, and a wait can hide the very race that
one looks for. Here a digest costs one launch on the device, its number stays in a buffer there (:class:`Ledger`), and
all numbers come to the host in one go when the run is over.

* ``formula.py`` defines the digest in words and integers;
* ``reference.py`` computes it with torch's own ops, on any device that has 64-bit integers;
* ``triton_kernel.py`` computes it in one pass over the memory, where Triton has a backend;
* ``kinds.py`` chooses between them, and others that packages bring;
* ``ledger.py`` keeps the numbers.

``docs/devices.md`` says how a device is added.
"""
