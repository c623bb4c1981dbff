"""Decode-time attention scores from a Triton kernel that is tuned once per GPU and validated before use.

`qk_score(q, k)` gives, for each new query, its product with every key of a KV cache:

    score[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d]

A config of the kernel (`KernelConfig`) is stored under the sizes it is fastest for (`TuningKey`), and no compiled
kernel is launched before it has agreed with a slow, plain loop kernel on this GPU model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import KernelConfig, TuningKey
    from .score import qk_score
    from .serving import explain, warmup

__version__ = "0.1.0"
__all__ = ["KernelConfig", "TuningKey", "__version__", "explain", "qk_score", "warmup"]

# The module of each public name. They load on first use, so that `import tunedqk` alone does not import torch.
_HOMES = {
    "KernelConfig": "config",
    "TuningKey": "config",
    "explain": "serving",
    "qk_score": "score",
    "warmup": "serving",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names of the module, with those that have not been loaded yet."""
    return sorted({*globals(), *__all__})
