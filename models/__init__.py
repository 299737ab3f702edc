"""Flax NNX model definitions and one weight-name table per family."""
