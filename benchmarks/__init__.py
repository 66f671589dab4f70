"""Measurements: each result names its command, commit and machine."""
