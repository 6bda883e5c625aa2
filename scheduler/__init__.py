"""gpujob: a file-watching, config-driven job scheduler for GPU servers. Packages: see docs/architecture.md."""

__version__ = "0.1.0"
