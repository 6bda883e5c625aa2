"""Tests of the program under faults: failing system calls, the disk states that a power cut leaves, and power cuts."""
