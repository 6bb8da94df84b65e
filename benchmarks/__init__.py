"""What tracing, digests, traces and sweeps cost. ``python -m benchmarks`` runs everything and prints tables."""
