"""Where the files of a model are: a local folder in Hugging Face form, the demo's, or one that is fetched when allowed.

Knows nothing of: what is in the files.
"""

import difflib
from pathlib import Path

from kvpool.errors import ConfigError, MissingExtraError
from kvpool.runner.demo import DEMO, demo_folder


def find_folder(model: str, *, allow_download: bool = False) -> Path:
    """The folder of `model`, which has a config.json. ConfigError tells what is missing, and what is near.

    Nothing is asked of a hub unless `allow_download`, and then only where there is no such folder.
    """
    folder = demo_folder() if model == DEMO else Path(model).expanduser()
    if not folder.exists() and allow_download:
        folder = _fetched(model)
    if not folder.is_dir():
        raise ConfigError(_why_none(model, folder))
    if not (folder / "config.json").is_file():
        names = sorted(path.name for path in folder.iterdir())
        there = f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "nothing"
        raise ConfigError(f"{model} has no config.json, so it is no model in Hugging Face form: there is {there}")
    return folder


def _fetched(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "engine") from error
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} is neither a local folder nor to be had from the hub: {error}") from None


def _why_none(model: str, folder: Path) -> str:
    if folder.exists():
        return f"{model} is a file: the folder that has config.json and the weights is needed"
    around = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, around, n=3, cutoff=0.5)
    others = f": {', '.join(str(folder.parent / name) for name in near)} is near" if near else ""
    hub = ""
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        hub = ", and nothing is fetched from a hub unless that is allowed (--allow-download)"
    return f"there is no folder {model}{others}{hub}; {DEMO!r} is the model of kvpool[demo]"
