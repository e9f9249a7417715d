"""The transformer under study.

Shapes are spelt in suffixes: B batch, T token, D model width, H head, K head width, F hidden, V vocabulary.
"""
