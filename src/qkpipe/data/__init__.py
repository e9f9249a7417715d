"""Text to batches: corpus, shards, and batches that are a function of (seed, step)."""
