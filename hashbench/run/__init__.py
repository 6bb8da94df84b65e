"""One run of a model: what goes in, what is in force, what it leaves."""
