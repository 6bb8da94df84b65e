"""Run and compare a model, or a plain function, and describe the outcome in one row."""
