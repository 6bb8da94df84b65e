"""Tracing: each dispatched op becomes one record, and a run becomes a :class:`~hashbench.core.records.Trace`.

Both tracers, the dispatch mode (``mode``) and the native one (``native.tracer``), hold the same parts:

* ``nodes``: numbers of records and leaves, and the last writer of each storage; in Python or in the C++ recorder.
* ``raw``: results, settings marks, modules and iterations; ``RawTrace.built`` makes the finished trace (``build``).
* ``calls``: a call's reads (``reads``), its record's id, its writes; ``compiled_records`` does so for compiled code,
  and ``collectives`` for what is given to other ranks, and for outputs that arrive later.

Rules:

1. Every byte written by a kernel is hashed once: all outputs, including those of ops that return tuples, lists or
   ``None``. Writes come from ``func._schema``. Views write nothing. Allocations (``empty*``), and storages passed to
   ``set_`` before any op wrote them, are *blank*. Python scalars are recorded. Undeclared in schemas: batch norm
   updates its running statistics; an op that takes ``running_mean``, ``running_var`` and a momentum is assumed to
   write them in training (``op_schema``).
2. Every leaf is hashed once, at its first read: parameter, buffer, model input, other. The runner also hashes
   parameters, buffers and inputs at the start, so that a write which bypassed the dispatcher before the first read is
   not mistaken for another initial state. Registered leaves are keyed by storage; a weak reference keeps the
   storage's struct until the trace is finished, so that no other tensor gets its address and name (``registered``).
3. Inputs are references to the record that wrote the storage last, with the storage offset: a trace is a graph. With
   ``hash_inputs`` inputs are hashed before and after the call, which exposes undeclared writes of custom ops; what
   changes during a call of torch's own ops was written by others.
4. A record has its phase, iteration and module path, and a backward record the forward op that it belongs to. Calls
   inside an optimizer's closure are forward and backward. Iterations are steps of optimizers (``steps``).
5. Seeded ops record the digest of the generator's state before the call.
6. Digests are XXH3-64 over the bytes in memory order, beside dtype, shape and stride; above 64 KiB over the digests
   of pieces (``digest``). On accelerators a 64-bit sum of scrambled words, computed there (``docs/devices.md``).
7. A trace changes no results, draws no random numbers and keeps no tensor alive. The writer of a storage is an
   attribute of the storage's Python object and dies with it, so that a reused address is never mistaken for its
   former tensor.
8. Collectives return before their data arrive. Their outputs are hashed at the first read, or at the end of the
   trace, after their ``Work`` is done; until then the trace keeps them, as their ``Work`` does. A read before the
   ``Work`` is known to be done is hashed before and after the wait: other content is an early read. What a rank gives
   is hashed just before the call (``collectives``). Which arguments these are, and which are written, is data
   (``collective_ops``). A process group is its global ranks and its number among the groups of these ranks
   (``groups``). An op on a ``DTensor`` is recorded as the local ops and collectives that it becomes.
9. The tracer (``native`` or ``python``) is part of the trace, its file, its row and ``environment.json``; traces of
   different tracers are never compared by kernel (``tracer``).
10. The text form has one line per record. A record's id is its phase, iteration, module, op and a count within these,
    so that an insertion renames nothing elsewhere. The last line proves that the file is complete (``file``).
11. Calls of compiled code are not announced: two functions of ``torch._dynamo.eval_frame`` are replaced while a trace
    is active. Without the stance ``force_eager`` such a call suspends the trace and becomes one ``opaque`` record
    (``compiled``).
12. Module paths come from an exchanged code object of ``Module._call_impl`` where its source is known by SHA-256
    (torch 2.11 to 2.15) and no other hooks are in force, else from global module hooks (``module_paths``).

Not seen: kernels inside a fused op (with the Python tracer inside a custom op, too); work of an extension outside the
dispatcher; Python threads with the Python tracer; writes that bypass the dispatcher without ``hash_inputs``.
"""
