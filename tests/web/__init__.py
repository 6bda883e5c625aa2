"""The page: its gate, its connections, its routes, in real processes."""
