"""From a user's model to its chains: TorchDynamo captures, our pass rewrites, ``explain`` tells.

``spelling``, ``norms`` and ``regions`` read what a graph's nodes compute, ``purity`` what they may
change, ``chains`` finds what can be fused, ``rewriting`` replaces it. ``dynamo`` captures, ``fuse``
puts all that into a model, ``backend`` into torch.compile.
"""

from __future__ import annotations

from epinorm.capture.explain import Explanation, Row, explain
from epinorm.capture.fuse import fuse, unfuse

__all__ = ["Explanation", "Row", "explain", "fuse", "unfuse"]
