"""Two traces to a verdict: where the difference entered that reached the results. Pure."""
