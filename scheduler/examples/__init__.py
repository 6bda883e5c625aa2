"""The example jobs that `gpujob demo` runs."""
