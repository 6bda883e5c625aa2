"""What each GPU says right now."""
