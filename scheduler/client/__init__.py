"""What a user interface may ask of a scheduler, whether or not one runs."""
