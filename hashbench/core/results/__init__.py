"""The files of a sweep: rows, traces, manifest, written so that a crash leaves them whole."""
