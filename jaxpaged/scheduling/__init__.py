"""Which requests run next, and which KV blocks they use: pure Python, no JAX."""
