"""What stands around an engine wherever it runs: requests checked and tokenised, outputs put together, metrics."""
