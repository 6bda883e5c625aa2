"""Finds conda and virtual environments, interpreters and programs, and determines how a job enters them."""
