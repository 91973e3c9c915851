"""Weight files of other programs: loading them into a model, and writing them.

A file is recognised by its content, not by its name (`recognize.py`). Reading never runs code from a file
(`pickled.py`, `distributed.py`). Prefixes that wrappers add to parameter names are removed (`names.py`).
"""
