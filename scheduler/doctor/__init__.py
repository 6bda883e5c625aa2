"""Checks of this machine and of the state folder: findings, each with one fix."""
