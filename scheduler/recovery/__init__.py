"""Rebuilds a damaged store from its readable rows, the attempt records, living processes and logs."""
