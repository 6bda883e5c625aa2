"""The command line: `gpujob VERB`."""
