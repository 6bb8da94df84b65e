"""Plug-ins into other harnesses and trainers: ``benchmarks/dynamo``, pytest, transformers, Lightning."""
