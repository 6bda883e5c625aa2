"""Measurements of the scheduler, compared with the highest speed of the machine: `python -m benchmarks`."""
