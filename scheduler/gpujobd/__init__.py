"""One queue for all users of a machine: the service gpujobd, set up by root."""
