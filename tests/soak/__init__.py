"""The soak: many small jobs while everything of ours is killed and meddled with, and a judge that believes the jobs alone."""
