"""Rebuilds a damaged store from what the other files say."""
