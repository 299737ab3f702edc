"""From checkpoint files to arrays."""
