"""Attention kernels and their reference implementation: arrays in, arrays out."""
