"""The sections of bench/gpu_check.py, by what they look at."""
