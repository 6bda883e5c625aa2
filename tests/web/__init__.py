"""Tests of the web page and the HTTP API: access, connections, routes, logs, events, metrics."""
