"""Text to token ids and back: tokenizers, chat templates, detokenising, stop strings, structured outputs."""
