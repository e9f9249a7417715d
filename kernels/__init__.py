"""Device code alone: one Triton operator a file, imported as ``qkpipe_kernels``.

The folder is called ``kernels`` and the package is not: a top-level package named ``kernels`` would be taken for the Hugging Face
library of that name.
"""
