"""Capabilities beside the core, a folder each."""
