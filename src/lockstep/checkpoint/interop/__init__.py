"""Other programs' weight files: reading them into a model, and writing in their formats.

A file is recognised by its content, never by its name (`recognize.py`); nothing that is read can run code
(`pickled.py`, `distributed.py`); prefixes that wrappers put before parameter names are found by structure (`names.py`).
"""
