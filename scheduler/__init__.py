"""gpujob: a file-watching, config-driven job scheduler for GPU servers. Its packages: docs/architecture.md."""

__version__ = "0.1.0"
