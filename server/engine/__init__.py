"""The engine's process and the client of it."""
