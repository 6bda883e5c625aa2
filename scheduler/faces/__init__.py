"""How it looks to people and programs."""
