"""Batches, paged KV cache and the decoder that drives compiled programs."""
