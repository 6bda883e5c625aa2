"""Access of user interfaces to a scheduler: queries and requests, with and without a running daemon."""
