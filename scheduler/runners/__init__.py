"""Runners, which start attempts of jobs, watch them, and adopt or settle them after a crash."""
