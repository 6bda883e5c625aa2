"""How jobs, GPUs, logs and errors look as text and as JSON."""
