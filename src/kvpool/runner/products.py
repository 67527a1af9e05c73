"""Products of matrices in fp32 on a CPU, by oneDNN where torch has it.

torch itself takes MKL, which needs twice the time on processors that are not Intel's. Results differ by rounding.

Knows nothing of: what is multiplied.
"""

import torch

_ROWS = 512
"""The order of a packed weight is chosen for so many rows; fewer are as fast with it."""
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_product(like: torch.Tensor) -> bool:
    """Whether `product` takes such a tensor."""
    return _HAS_ONEDNN and like.device.type == "cpu" and like.dtype == torch.float32


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix, in the order in which it is read; only for `product`."""
    order: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return order


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. `weight` is packed, or it or its transpose is contiguous: all else takes forever."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
