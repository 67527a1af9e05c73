"""Packed linear layers compute what the model does."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tests.runner.stock import tolerance
from tests.runner.tiny_models import CONFIGS, OTHERS, VOCABULARY, tiny
from torch import nn

from kvpool.runner.loading import LoadedModel
from kvpool.runner.packing import PackedLinear, pack, packed_bytes
from kvpool.runner.startup import weights_bytes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_a_packed_model_says_the_same(name: str) -> None:
    stock = tiny(name).stock
    packed = deepcopy(stock)
    pack(packed)
    assert any(isinstance(layer, PackedLinear) for layer in packed.modules())
    tokens = torch.randint(1, VOCABULARY, (1, 21), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        truth, found = (model(tokens, use_cache=False).logits for model in (stock, packed))
    assert (truth - found).abs().max() <= tolerance(truth)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 600])
def test_a_layer(count: int, has_bias: bool) -> None:
    torch.manual_seed(count)
    linear = nn.Linear(48, 80, bias=has_bias)
    packed = PackedLinear(linear)
    x = torch.randn(2, count, 48)
    with torch.no_grad():
        assert torch.allclose(packed(x), linear(x), atol=1e-5)
        assert torch.equal(packed(x), packed(x))
    assert torch.equal(packed.weight, linear.weight)


def test_other_dtypes_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    pack(model)
    assert [type(layer) for layer in model] == [nn.Linear, PackedLinear]
    assert packed_bytes(model) == 64


def test_packed_weights_count_as_weights() -> None:
    model = deepcopy(tiny("mistral").stock)
    before = weights_bytes(LoadedModel("tiny", Path(), model, None, frozenset()))
    pack(model)
    assert weights_bytes(LoadedModel("tiny", Path(), model, None, frozenset())) == before
