"""Jobs, requests, states, placement and decisions: pure, without clock, disk, process, network or chance."""
