"""Diagnose why runs of a model differ: experiments on the model and on a captured call, and the cause they show."""
