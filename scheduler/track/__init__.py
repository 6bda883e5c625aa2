"""`gpujob track`: runs a list of commands and records their states in a session file."""
