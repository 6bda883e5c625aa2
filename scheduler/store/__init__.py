"""The SQLite store and the files beside it."""
