"""numba where it is installed, nothing where it is not: the plain PyTorch paths then serve alone."""

try:
    from numba import njit

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False

    def njit(*args, **_options):
        """Stand in for `numba.njit`: leave the function as it is (it is never called without numba)."""
        return args[0] if args else lambda function: function


# No fastmath anywhere: every bit is defined.
# A helper of a compiled loop. LLVM inlines what is small; a loop over arrays it calls, at some 50 ns a call.
helper = njit(nogil=True)
# An entry point, compiled once and cached beside its source. One caveat of numba's cache: it watches the
# entry point's own file only, so after editing a helper in another file remove __pycache__.
compiled = njit(cache=True, nogil=True)
