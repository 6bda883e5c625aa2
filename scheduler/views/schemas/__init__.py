"""JSON Schemas of the JSON that gpujob writes, for users. `make tables` generates them from `views/documents.py`."""
