"""Tests of the GPU readers, and imitations (fakes) of NVIDIA's library and of nvidia-smi."""
