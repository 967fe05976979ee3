"""Instruments for developers of this project: compiled programs, sizes; not installed."""
