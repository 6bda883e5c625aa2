"""The commands of `gpujob`."""
