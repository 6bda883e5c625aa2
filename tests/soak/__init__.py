"""The soak: runs many small jobs, kills processes, changes files, and compares the store with what the jobs wrote."""
