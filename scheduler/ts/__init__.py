"""The task spooler's command line, `ts`."""
