"""The warm process: a background process of a user that has imported the program and forks for each command."""
