"""Readers of the files and settings that users edit; they return typed values."""
