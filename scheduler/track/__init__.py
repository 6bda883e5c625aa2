"""Runs a list of commands and keeps track of it in a session file: `gpujob track`."""
