"""Checkpoint bytes to arrays."""
