"""Config of a study: frozen models, loading and resolving, identity of a run. Imports no torch."""

from qkpipe.config.load import RunKey, Study, load_study
from qkpipe.config.models import RunConfig

__all__ = ["RunConfig", "RunKey", "Study", "load_study"]
