"""The web page and the HTTP API: `gpujob web`."""
