"""The warm process: one per user, it has imported the program and forks a process for each command."""
