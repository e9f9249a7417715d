"""Numerical formats and attention: what others build on."""

from .minifloat import round_minifloat

__all__ = ["round_minifloat"]
