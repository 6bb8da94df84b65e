"""The native tracer's library: C++ compiled on the user's machine, once per torch, and cached.

``build`` finds or compiles the library, ``cache`` keeps it. Without one, the Python tracer is used.

A wheel holds the source, since ATen has no stable ABI. ``make setup``, ``hashbench native`` or the first trace compiles
it (10 to 25 s of CPU, 1 GB of memory). ``build()`` returns the library or the reason why there is none.

``recorder.cpp`` is one translation unit with these headers, each of which includes those above it:

* ``tables.h``: raw records, last writers of storages, names of tensors, modules; the recorder of one trace.
* ``ops.h``: plans of ops, and the defaults of their arguments.
* ``digest.h``, ``arguments.h``: contents of tensors, and bytes of other arguments.
* ``thread.h``: a thread's state, and its callbacks into Python.
* ``forward.h``: calls forwarded to Python. ``call.h``: calls recorded in C++.
* ``kernels.h``: calls that are not dispatched: of generated kernels, and of the allocators of generated modules.
* ``unboxed.h``: kernels of usual ops that spare boxing a call. Optional: without it (or with
  ``HASHBENCH_CXXFLAGS=-DHASHBENCH_ONLY_BOXED``) every call is boxed, with the same records.

* Compiler: ``$CXX``, else ``c++``, ``g++``, ``clang++``. Headers come from torch's wheel; Python's are not needed.
* Key: a digest of source, flags, torch's version, commit, ABI and library sizes, architecture, Python, C and C++
  libraries. Neither processor (flags are portable) nor compiler is part of it.
* Place: ``$HASHBENCH_CACHE/native``, else ``$XDG_CACHE_HOME/hashbench/native``, else ``~/.cache/hashbench/native``; a
  folder among the temporary files where that is read-only, full, mounted noexec or writable by others.
* Trust: the folder and its parents belong to this user or root, and no other user can write them (parents with the
  sticky bit aside, such as ``/tmp``). The file name holds the SHA-256 of the content, checked before ``dlopen``.
* Concurrency: one process compiles under a file lock and renames the result into place.
* Trial: a new library is loaded in a fresh process first.
* Failures are remembered for a day per compiler; a compiler is ended after 300 s; libraries unused for 90 days are
  removed at the next compilation.

AddressSanitizer: ``HASHBENCH_CXXFLAGS="-fsanitize=address -fno-omit-frame-pointer"`` with ``LD_PRELOAD`` of libasan
and libstdc++ and ``ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1`` runs ``tests/core/trace/native`` with a
checked recorder.
"""
