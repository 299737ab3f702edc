"""The OpenAI-compatible HTTP server; nothing else imports it."""
