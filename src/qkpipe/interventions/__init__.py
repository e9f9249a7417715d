"""Interventions: what acts against a collapse. One file each, found by itself (config.base.Mechanism)."""
