"""Measurements of the scheduler beside what the machine can do at best: `python -m benchmarks`."""
