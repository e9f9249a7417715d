"""qkpipe: why does low-precision transformer training collapse, and what is the smallest thing that prevents it?"""

__version__ = "0.1.0"
