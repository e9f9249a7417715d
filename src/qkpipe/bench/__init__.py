"""How fast the operators and a training step are, against their peers, and only where they are correct."""
