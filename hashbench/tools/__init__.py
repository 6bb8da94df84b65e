"""Tools for single questions. Importing one imports no other."""
