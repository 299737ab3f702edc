"""Attention kernels and their plain specification: arrays in, arrays out."""
