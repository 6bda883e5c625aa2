"""The program broken on purpose: at each system call, in each state that a disk may have kept, by cutting the power."""
