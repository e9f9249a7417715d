"""Finds attention that no guard saw, in the autograd graph of one forward.

An own softmax leaves a pattern there, the product of two batches of matrices, a softmax, and another product; a kernel of someone
else's leaves a node that names itself. What was called through a guard is marked as it is called. Nothing is intercepted for
this, nothing is computed, and only one forward pays for it. Compiled code and reentrant checkpointing leave no such graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_KERNEL = re.compile(r"attn|attention|fmha", re.IGNORECASE)
_SOFTMAX = re.compile(r"(?<!log)softmax", re.IGNORECASE)
_PRODUCT = re.compile(r"^(Bmm|Baddbmm)Backward")
_ELEMENTWISE = re.compile(
    r"^(Add|Alias|AsStrided|Cat|Clamp|Clone|Constant|Copy|CopySlices|Div|Expand|MaskedFill|Mul|NativeDropout|Permute|Reshape|"
    r"ReshapeAlias|Select|Slice|Split|Squeeze|Sub|Tanh|ToCopy|Transpose|Unbind|Unsqueeze|UnsafeView|View|Where)Backward"
)


class Search:
    """Over one forward: :meth:`guarded` after each intercepted call, :meth:`look` after each module, innermost first."""

    def __init__(self) -> None:
        self.found: list[str] = []
        """Names of the modules that attend unseen."""
        self.graphs = 0
        self._seen: set[Any] = set()  # nodes: kept, as a dropped one would not be known again

    def guarded(self, outputs: Any, inputs: Iterable[Any]) -> None:
        """Everything between is the kernel's own."""
        ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}
        for _ in self._new(_roots(outputs), ends):
            pass

    def look(self, name: str, outputs: Any) -> None:
        """Look through what led to ``outputs`` and was not looked through before; it was done in module ``name``."""
        roots = _roots(outputs)
        self.graphs += bool(roots)
        for node in self._new(roots, set()):
            if (_KERNEL.search(node.name()) or _attends(node)) and name not in self.found:
                self.found.append(name)

    def _new(self, roots: list[Any], ends: set[Any]) -> Iterator[Any]:
        stack = roots
        while stack:
            node = stack.pop()
            if node not in self._seen and node not in ends:
                self._seen.add(node)
                yield node
                stack.extend(_parents(node))


def _roots(outputs: Any) -> list[Any]:
    return [x.grad_fn for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]


def _parents(node: Any) -> list[Any]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _attends(node: Any) -> bool:
    """Whether a node multiplies a softmax of a product."""
    if not _PRODUCT.match(node.name()):
        return False
    softmaxes = [n for n in _behind_elementwise(node) if _SOFTMAX.search(n.name())]
    return any(_PRODUCT.match(n.name()) for softmax in softmaxes for n in _behind_elementwise(softmax))


def _behind_elementwise(node: Any) -> list[Any]:
    """The nearest nodes behind ``node`` that do more than move or change single elements."""
    found, seen, stack = [], set(), _parents(node)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _ELEMENTWISE.match(node.name()):
            stack.extend(_parents(node))
        else:
            found.append(node)
    return found
