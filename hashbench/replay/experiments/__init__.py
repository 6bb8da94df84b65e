"""The experiments on a captured call: what each changes around a replay."""
