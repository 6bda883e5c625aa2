"""The program under faults: failing system calls, disk states after a power cut, and power cuts."""
