"""`gpujob ts`, also by the name ts or tsp: the command line of GPU Task Spooler."""
