"""Finds conda and virtual environments, interpreters and programs, and how a job enters an environment."""
