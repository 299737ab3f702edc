"""The text side of an engine, wherever it runs: requests checked and tokenised, outputs detokenised, metrics."""
