"""Text becomes typed values here; changed files are noticed here."""
