"""Tests of the program under faults.

The faults are failing system calls, power cuts, and the disk states that a power cut leaves.
"""
