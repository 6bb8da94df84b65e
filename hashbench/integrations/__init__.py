"""Plug-ins into other harnesses: ``benchmarks/dynamo``, pytest."""
