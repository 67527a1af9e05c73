"""Chats: how messages become token ids of prompt and answer, with a tokenizer made here and kept in a folder."""

import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, MissingExtraError, TraceError
from kvpool.replay.chat import DEFAULT_OUTPUT_TOKENS, Tokenizer, load_tokenizer
from kvpool.replay.readers import Trace, open_trace
from kvpool.replay.trace import TraceRequest

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('tools cannot begin') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def by_character(messages: list[dict[str, str]]) -> list[int]:
    """A tokenizer whose ids are the characters."""
    text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
    return [ord(character) for character in text + ("" if messages[-1]["role"] == "assistant" else "<assistant>")]


def text_of(ids: Any) -> str:
    return "".join(map(chr, ids))


def chats(folder: Path, *records: dict[str, Any], skip_bad: bool = False, tokenizer: Tokenizer = by_character) -> Trace:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return open_trace(path, skip_bad=skip_bad, tokenizer=tokenizer)


def only(trace: Trace) -> TraceRequest:
    [request] = trace
    return request


def test_the_last_message_of_the_assistant_is_the_output(tmp_path: Path) -> None:
    trace = chats(tmp_path, {"messages": [USER, ANSWER], "user": "u", "session_id": 4, "turn": 2})
    request = only(trace)
    assert (trace.format, trace.block_size) == ("chat", None)
    assert text_of(request.prompt_token_ids) == "<user>hi<assistant>"
    assert text_of(request.output_token_ids) == "yo"
    assert (request.num_prompt_tokens, request.num_output_tokens) == (19, 2)
    assert (request.tenant, request.session, request.turn) == ("u", "4", 2)


def test_a_completion_is_the_output(tmp_path: Path) -> None:
    request = only(chats(tmp_path, {"messages": [USER], "completion": "yes", "max_tokens": 99}))
    assert (text_of(request.output_token_ids), request.num_output_tokens) == ("yes", 3)


@pytest.mark.parametrize(("limit", "expected"), [({"max_tokens": 5}, 5), ({}, DEFAULT_OUTPUT_TOKENS)])
def test_without_an_answer_only_its_length_is_known(tmp_path: Path, limit: dict[str, int], expected: int) -> None:
    request = only(chats(tmp_path, {"messages": [USER], **limit}))
    assert (request.num_output_tokens, request.output_token_ids) == (expected, None)


def test_content_in_parts_and_tool_calls(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    request = only(chats(tmp_path, {"messages": [USER | {"content": parts}, call, {"role": "tool", "content": "ok"}]}))
    assert text_of(request.prompt_token_ids) == '<user>ab<assistant>[{"id":1}]<tool>ok<assistant>'


def test_a_chat_without_a_time_arrives_a_second_after_the_one_before(tmp_path: Path) -> None:
    times: list[dict[str, float]] = [{}, {}, {"timestamp": 7.5}, {}]
    assert [r.arrival_s for r in chats(tmp_path, *({"messages": [USER]} | time for time in times))] == [0, 1, 7.5, 8.5]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": []}, "messages hold no prompt"),
        ({"messages": [ANSWER]}, "messages hold no prompt"),
        ({"messages": [{"content": "x"}]}, "missing required field `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url' has no text"),
        ({"messages": [USER], "max_tokens": -1}, "an output of -1 tokens"),
        ({"messages": [USER], "timestamp": 1.0}, "arrives at 1.0 s, after a request that arrives at 5.0 s"),
    ],
)
def test_a_bad_chat_is_named_or_counted(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    good = {"messages": [USER], "timestamp": 5.0}
    with pytest.raises(TraceError) as caught:
        list(chats(tmp_path, good, record))
    assert "chats.jsonl:2: " in str(caught.value)
    assert problem in str(caught.value)
    trace = chats(tmp_path, good, record, {"messages": [USER]}, skip_bad=True)
    assert ([r.arrival_s for r in trace], trace.num_skipped) == ([5.0, 6.0], 1)


# The tokenizer of a folder: an id a byte


def saved(folder: Path, template: str | None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pieces = ["<unk>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def decoded(folder: str, ids: Any) -> str:
    import transformers

    return str(transformers.AutoTokenizer.from_pretrained(folder).decode(ids))


@pytest.mark.parametrize(
    ("template", "prompt", "output"),
    [
        (TEMPLATE, "<user>hi<assistant>", "yo"),
        (None, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yo<|im_end|>\n"),
    ],
    ids=["own template", "ChatML"],
)
def test_load_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, prompt: str, output: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may reach for the network")

    folder = saved(tmp_path / "tokenizer", template)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    trace = chats(tmp_path, {"messages": [USER, ANSWER]}, tokenizer=load_tokenizer(folder))
    request = only(trace)
    assert decoded(folder, request.prompt_token_ids) == prompt
    assert decoded(folder, request.output_token_ids) == output
    assert (request.num_prompt_tokens, request.num_output_tokens) == (len(prompt), len(output))
    assert list(pickle.loads(pickle.dumps(trace))) == [request]


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer", TEMPLATE))
    trace = chats(tmp_path, {"messages": [{"role": "tool", "content": "x"}]}, tokenizer=tokenizer)
    with pytest.raises(TraceError, match=r":1: the tokenizer refuses the messages \(tools cannot begin\)"):
        list(trace)


@pytest.mark.parametrize("name", ["no-such-folder", "nobody/no-such-model"])
def test_no_tokenizer_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("nothing may reach for the network"))
    with pytest.raises(ConfigError, match=f"'{name}' is neither .*local_files_only=False"):
        load_tokenizer(name)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"transformers is not installed: pip install 'kvpool\[chat\]'"):
        load_tokenizer("anything")


def test_without_msgspec() -> None:
    code = "import sys; sys.modules['msgspec'] = None; import kvpool.replay.readers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "msgspec is not installed: pip install 'kvpool[replay]'" in done.stderr
