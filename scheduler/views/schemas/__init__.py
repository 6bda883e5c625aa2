"""JSON Schemas of our JSON, for users; `make tables` writes them from `views/documents.py`."""
