"""The campaign behind docs/reliability.md: `make torture`, or `python -m torture --only NAME --minutes N`."""
