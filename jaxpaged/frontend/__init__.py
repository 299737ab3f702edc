"""The text side of an engine, wherever it runs: requests checked and tokenized, outputs detokenized, metrics."""
