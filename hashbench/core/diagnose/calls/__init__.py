"""Make one call again: copy its arguments, run it below autograd, and say what it left.

    live = LiveCall(capture(func, args, kwargs, limit_bytes=2**30))
    with captured_environment(live.call):
        first = live.run().digests()
        live.reset()
        assert live.run().digests() == first

Copies keep strides, offsets, holes, shared and overlapping memory, and addresses modulo 64, by all of which kernels are
selected. A call is that of an op, of a function, or of a :class:`~hashbench.core.diagnose.calls.call.Callee`.
"""
