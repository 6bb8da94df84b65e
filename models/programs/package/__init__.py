"""A program that is run as a module: ``python -m package``."""
