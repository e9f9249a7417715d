"""Config of a study: frozen models, loading and resolving, identity of a run. Imports no torch.

Names load on first use: the models look for every mechanism, and a mechanism's file, which may be the first one imported, needs
`qkpipe.config.base` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkpipe.config.load import RunKey, Study, load_study
    from qkpipe.config.models import RunConfig

_HOMES = {"RunConfig": "models", "RunKey": "load", "Study": "load", "load_study": "load"}

__all__ = ["RunConfig", "RunKey", "Study", "load_study"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
