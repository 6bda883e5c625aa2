"""Jobs, GPUs and logs as text for people and as JSON for programs."""
