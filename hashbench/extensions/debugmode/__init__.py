"""Compare the logs of torch's ``DebugMode`` of two runs."""
