"""The native tracer's library: C++ that is compiled on the user's machine, once for each torch, and kept in a cache.

``build`` finds or makes the library, ``cache`` keeps it. Where there is none, the Python tracer is used.
"""
