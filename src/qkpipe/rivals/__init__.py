"""What others put on a model against the same runaway, as objects of one kind: attach, train as before, ``detach()``.

    clip = QKClip(model, optimizer, threshold=100.0)   # rescales W_Q and W_K of a head whose logits grow
    clip = ZClip(optimizer)                            # clips gradient norms that are outliers in time
    clip = AdaGC(optimizer)                            # clips each tensor's gradient by its own history
    spam = SPAM(optimizer)                             # clips spikes elementwise, resets Adam's moments
    sigma_reparam(model)                               # W -> (gamma / sigma(W)) W in every linear layer
    flex_attention(q, k, v, score_mod=SoftCap(50.0))   # logits through 50 tanh(S / 50)

The clips act inside ``optimizer.step()``, need no other call, and keep what they remember in ``state_dict()``. On a model of
someone else's QKClip senses by itself, as QKGuard does. Each follows its published definition, named in its docstring. QK-norm
variants are modules: :mod:`qkpipe.model.qk_norm`.
"""

from qkpipe.model.sigma_reparam import SigmaReparam, sigma_reparam
from qkpipe.rivals.adagc import AdaGC
from qkpipe.rivals.qk_clip import QKClip
from qkpipe.rivals.soft_cap import SoftCap
from qkpipe.rivals.spam import SPAM
from qkpipe.rivals.zclip import ZClip

__all__ = ["SPAM", "AdaGC", "QKClip", "SigmaReparam", "SoftCap", "ZClip", "sigma_reparam"]
