"""Padding to a bucket, the compiled programs, the pools and the memory plan."""
