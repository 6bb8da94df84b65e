"""The folder that makes a Python load our hook; see ``sitecustomize``."""
