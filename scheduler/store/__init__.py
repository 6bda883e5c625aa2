"""What is remembered: SQLite, and the files beside it."""
