"""The running scheduler: its process, its loop and the loop's parts."""
