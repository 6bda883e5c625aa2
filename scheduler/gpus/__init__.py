"""Reads the GPUs of this machine."""
