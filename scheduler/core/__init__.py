"""Jobs, requests, states, placement and decisions: pure code without clock, disk, processes, network or randomness."""
