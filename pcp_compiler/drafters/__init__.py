"""Models that propose tokens for a target to verify, and their checkpoint loaders."""
