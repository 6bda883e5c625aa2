"""The page and the HTTP API: a process of its own over the desk, which only loopback reaches."""
