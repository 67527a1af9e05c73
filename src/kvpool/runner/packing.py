"""Linear layers for a CPU: their weights lie in the order in which oneDNN reads them.

torch multiplies fp32 by MKL, which takes twice as long on processors that are not Intel's. Results differ by rounding.

Knows nothing of: which model the layers are of.
"""

from typing import Any

import torch
from torch import nn

_ROWS = 512
"""Tokens that the order is chosen for; fewer are as fast with it."""


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """Computes what a linear layer does. Its weight is kept once, packed; reading `weight` unpacks a copy."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, _ROWS)
        self.training = linear.training

    @property
    def weight(self) -> torch.Tensor:
        return self.packed.to_dense()

    @property
    def num_bytes(self) -> int:
        """Of the packed weight."""
        return 4 * int(self.in_features) * int(self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack(model: nn.Module) -> None:
    """All plain linear layers in fp32 on a CPU, one by one, so that no weight is there twice for long.

    Nothing is changed where this torch has no oneDNN. Do not train, move or save the model afterwards.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and _is_packable(child.weight):
                    setattr(parent, name, PackedLinear(child))


def packed_bytes(model: nn.Module) -> int:
    """Of all packed weights, which are no parameters."""
    return sum(layer.num_bytes for layer in model.modules() if isinstance(layer, PackedLinear))


def _is_packable(weight: Any) -> bool:
    return bool(weight.dtype == torch.float32 and weight.device.type == "cpu")
