"""Measurements of the scheduler, compared with the fastest the machine can do: `python -m benchmarks`."""
