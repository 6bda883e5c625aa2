"""Starts attempts, watches them, and finds them again after a crash."""
