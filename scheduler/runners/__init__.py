"""Start, look, stop: attempts as processes, and the records they leave. What a runner must do: `core/ports.py`; made in `engine/main.py`."""
