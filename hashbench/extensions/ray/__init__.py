"""Run the models of a sweep on a Ray cluster (``--executor ray``)."""
