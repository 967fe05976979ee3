"""Comparisons and measurements; not installed, and free to change."""
