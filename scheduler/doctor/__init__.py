"""Checks of this machine and of the state folder. A finding of a problem proposes at most one command as the fix."""
