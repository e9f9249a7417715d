"""Probes: what edits the realised update to ask a causal question. One file each, found by itself."""
