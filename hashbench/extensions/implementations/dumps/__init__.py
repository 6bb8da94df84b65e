"""Dumps of other tools: which tensor of one run first has no partner in the other? (``docs/dumps.md``)"""
