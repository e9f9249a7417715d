"""The training loop: one run from its resolved config to its tables, exactly resumable."""
