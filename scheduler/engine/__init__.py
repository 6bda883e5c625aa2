"""What runs by itself: the loop, recovery, the daemon's life."""
