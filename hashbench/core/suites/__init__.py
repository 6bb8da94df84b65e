"""Suites: where models come from."""
