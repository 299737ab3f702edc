"""Frozen values and their checks: configuration, sampling parameters, outputs, messages. Standard library only."""
