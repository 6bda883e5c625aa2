"""What things are and what should happen: pure rules, no clock, disk, process or network."""
