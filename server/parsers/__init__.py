"""Readers of what models write: tool calls and reasoning, out of a text that grows. Pure."""
