"""The soak: many small jobs while processes are killed and files changed; a judge believes only what the jobs wrote."""
