"""Linear layers whose weights are packed.

Knows nothing of: which model the layers are of.
"""

from torch import Tensor, nn

from kvpool.runner.products import has_product, packed, product


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """Computes what a linear layer does. Its weight is kept once, packed; reading `weight` unpacks a copy."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self._packed = packed(linear.weight.data)
        self.training = linear.training

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    @property
    def num_bytes(self) -> int:
        """Of the packed weight."""
        return 4 * int(self.in_features) * int(self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self._packed, self.bias)


def pack(model: nn.Module) -> None:
    """All plain linear layers for which there are such products, one by one: no weight is there twice for long.

    Do not train, move or save the model afterwards.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and has_product(child.weight):
                setattr(parent, name, PackedLinear(child))


def packed_bytes(model: nn.Module) -> int:
    """Of all packed weights, which are no parameters."""
    return sum(layer.num_bytes for layer in model.modules() if isinstance(layer, PackedLinear))


def few_tokens(model: nn.Module) -> frozenset[int]:
    """Numbers of tokens that take a model longer than four do, which have better kernels on a CPU."""
    if next(model.parameters()).device.type != "cpu":
        return frozenset()
    return frozenset({1, 2, 3}) if packed_bytes(model) else frozenset({2, 3})
