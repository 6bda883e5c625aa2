"""`ts`: the command line of GPU Task Spooler, carried out by a gpujob scheduler."""
