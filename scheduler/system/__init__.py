"""Thin helpers over the operating system: atomic files, safe opening, processes, /proc, crash points."""
