"""What the scheduler makes of GPUs: stand-ins for NVIDIA's library and for nvidia-smi, and the stories told with them."""
