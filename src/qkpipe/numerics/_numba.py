"""numba where it is installed, nothing where it is not: the plain PyTorch paths then serve alone."""

import hashlib
import os
from pathlib import Path

try:
    import numba
    from numba import njit

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False

    def njit(*args, **_options):
        """Stand in for `numba.njit`: leave the function as it is (it is never called without numba)."""
        return args[0] if args else lambda function: function


def cache_folder(sources: Path) -> Path:
    """Where code compiled from the modules in ``sources`` is kept: a folder named by the hash of all of them.

    numba itself watches an entry point's own file alone: after an edit of a helper in another module it would go on running
    the old code.
    """
    digest = hashlib.sha256()
    for module in sorted(sources.glob("*.py")):
        digest.update(module.name.encode() + b"\0" + module.read_bytes() + b"\0")
    return sources / "__pycache__" / f"numba-{digest.hexdigest()[:12]}"


_HERE = Path(__file__).parent
# Elsewhere (a read-only installation, or a user's own choice) numba's default is kept.
if HAVE_NUMBA and "NUMBA_CACHE_DIR" not in os.environ and os.access(_HERE, os.W_OK):
    numba.config.CACHE_DIR = str(cache_folder(_HERE))

# No fastmath anywhere: every bit is defined.
# A helper of a compiled loop. LLVM inlines what is small; a loop over arrays it calls, at some 50 ns a call.
helper = njit(nogil=True)
# An entry point, compiled once and cached.
compiled = njit(cache=True, nogil=True)
