"""Start, look, stop: attempts as processes, and the records they leave."""
