"""The store (an SQLite database) and the files beside it."""
