"""Files and settings that people edit, read as typed values."""
