"""Fault sources: where a numerical error enters a training step. One file a source, found by itself (config.base.Mechanism)."""
