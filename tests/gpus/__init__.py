"""Tests of the GPU readers, and fakes of NVIDIA's library and of nvidia-smi."""
