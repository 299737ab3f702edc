"""Who runs next and which blocks they own: pure Python, no JAX."""
