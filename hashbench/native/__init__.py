"""The native tracer's library: C++ compiled on the user's machine, once per torch, and cached.

``build`` finds or compiles the library, ``cache`` keeps it. Without one, the Python tracer is used.
"""
