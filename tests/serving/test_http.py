"""The HTTP interface beyond what OpenAI's client needs: limits, refusals, ids, keys, figures."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.serving.served import MODEL, Running, eventually, running
from tests.serving.toy import ByteTokenizer, FailingWorker, HeldWorker, ToyWorker, continued

from kvpool import KVCacheManager
from kvpool.errors import WorkerDied
from kvpool.serving.app import ServerConfig
from kvpool.serving.engine_loop import EngineLoop


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(max_model_len=400, max_waiting=100) as server:
        yield server


def complete(served: Running, **fields: Any) -> httpx.Response:
    with served.http() as http:
        return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "temperature": 0, **fields})


def chat(served: Running, **fields: Any) -> httpx.Response:
    turns = [{"role": "user", "content": "hi"}]
    with served.http() as http:
        return http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 3, "temperature": 0, **fields})


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- prompts


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([*b"one"], ["one"]),
        ([[*b"one"], [*b"two"]], ["one", "two"]),
    ],
)
def test_prompts_of_every_form(served: Running, prompt: object, texts: list[str]) -> None:
    answer = complete(served, prompt=prompt, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == [continued(text, 3) for text in texts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == [*range(2 * len(texts))]
    assert answer["usage"]["prompt_tokens"] == 3 * len(texts)
    assert answer["usage"]["completion_tokens"] == 6 * len(texts)


@pytest.mark.parametrize("prompt", [[], [[]], "", ["a", 1], [[1], "a"], [999], [-1], {"a": 1}, 7, None, [["a"]]])
def test_prompts_that_are_none(served: Running, prompt: object) -> None:
    assert error_of(complete(served, prompt=prompt))["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long(served: Running) -> None:
    error = error_of(complete(served, prompt="x" * 400))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "400 tokens" in error["message"]
    assert "shorten it to 399" in error["message"]
    error = error_of(complete(served, prompt="x" * 390, max_tokens=11))
    assert "ask for 10 or less" in error["message"]
    assert complete(served, prompt="x" * 390, max_tokens=10).status_code == 200


def test_a_chat_has_all_that_fits_unless_told(served: Running) -> None:
    answer = chat(served, max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == 400
    assert chat(served, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5


def test_contents_in_parts(served: Running) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    answer = chat(served, messages=[{"role": "user", "content": parts}]).json()
    assert answer["choices"][0]["message"]["content"] == continued("<user>hello\n<assistant>", 3)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "no role"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "nobody", "content": ""}],
        "hi",
    ],
)
def test_messages_that_are_none(served: Running, messages: object) -> None:
    error_of(chat(served, messages=messages))


# -- what is asked for


def test_an_end_token_ends_the_answer_and_is_no_text(served: Running) -> None:
    choice = complete(served, prompt="stop!").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    choice = complete(served, prompt="go on!", ignore_eos=True, max_tokens=3).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(served: Running, stream: bool) -> None:
    whole = continued("tell", 40)
    stop = whole[10:13]
    answer = complete(served, prompt="tell", max_tokens=40, stop=[stop, "never"], stream=stream)
    text, finish = streamed_text(answer) if stream else whole_text(answer)
    assert text == whole[: whole.index(stop)]
    assert finish == "stop"
    token = ord(whole[5])
    answer = complete(served, prompt="tell", max_tokens=40, stop_token_ids=[token])
    assert answer.json()["choices"][0]["text"] == whole[: whole.index(chr(token))]


def whole_text(answer: httpx.Response) -> tuple[str, str]:
    choice = answer.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def streamed_text(answer: httpx.Response) -> tuple[str, str]:
    choices = [event["choices"][0] for event in events_of(answer)]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_choices_count_the_seed_up(served: Running) -> None:
    answer = complete(served, prompt="some", n=3, seed=7, temperature=1, max_tokens=8).json()
    assert [choice["text"] for choice in answer["choices"]] == [continued("some", 8, 7 + at) for at in range(3)]
    assert complete(served, prompt="some", seed=-1, temperature=1).status_code == 200


def test_choices_are_streamed_side_by_side(served: Running) -> None:
    answer = complete(served, prompt="some", n=3, seed=7, temperature=1, max_tokens=8, stream=True)
    texts = dict.fromkeys(range(3), "")
    for event in events_of(answer):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {at: continued("some", 8, 7 + at) for at in range(3)}


def test_logprobs_of_completions(served: Running) -> None:
    text = continued("ab", 4)
    told = complete(served, prompt="ab", max_tokens=4, logprobs=2).json()["choices"][0]["logprobs"]
    assert told["tokens"] == [*text]
    assert told["token_logprobs"] == [-0.5] * 4
    assert [len(likely) for likely in told["top_logprobs"]] == [2] * 4
    assert told["text_offset"] == [0, 1, 2, 3]


def test_offsets_count_letters_whatever_tokens_they_are_cut_into(served: Running) -> None:
    prompt = "I like \N{GRINNING FACE} and 東京!"
    told = complete(served, prompt=prompt, echo=True, logprobs=1).json()["choices"][0]
    starts = dict(zip(told["logprobs"]["text_offset"], told["logprobs"]["tokens"], strict=True))
    assert starts[len(prompt) - 1] == "!"
    for at, token in starts.items():
        if token.isascii() and len(token) == 1:
            assert told["text"][at] == token


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_with_logprobs(served: Running, max_tokens: int) -> None:
    answer = complete(served, prompt="abcdef" * 60, max_tokens=max_tokens, logprobs=1, echo=True).json()
    choice = answer["choices"][0]
    text = "abcdef" * 60 + continued("abcdef" * 60, max_tokens)
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == [*text]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(text) - 1)]
    assert choice["logprobs"]["text_offset"] == [*range(len(text))]
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_logprobs_of_chats(served: Running) -> None:
    choice = chat(served, logprobs=True, top_logprobs=3).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert [entry["bytes"] for entry in content] == [[ord(entry["token"])] for entry in content]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 3
    assert chat(served, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(served).json()["choices"][0]["logprobs"] is None


def test_logprobs_of_prompts(served: Running) -> None:
    told = complete(served, prompt="abc", prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert [[*entry] for entry in told[1:]] == [["98"], ["99"]]
    assert told[1]["98"] == {"logprob": -0.5, "decoded_token": "b"}


# -- what is refused


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, "n is 0: 1 to 128"),
        ("n", 101, "101 requests"),
        ("temperature", -0.5, "-0.5: 0 to 2"),
        ("top_p", 0, "top_p is 0"),
        ("top_k", -2, "top_k is -2"),
        ("max_tokens", 0, "max_tokens is 0: 1 or more"),
        ("max_tokens", "many", "max_tokens"),
        ("logprobs", 21, "logprobs is 21: 0 to 20"),
        ("prompt_logprobs", 21, "0 to 20"),
        ("stop", [""], "empty string"),
        ("stop", ["a"] * 17, "17 strings"),
        ("stream_options", {"include_usage": True}, "stream true"),
        ("cache_salt", "", "cache_salt is empty"),
        ("best_of", 3, "best_of is 3"),
        ("logit_bias", {"5": 10}, "not offered"),
        ("suffix", "end", "not offered"),
        ("presence_penalty", 0.5, "not offered"),
    ],
)
def test_bad_fields_are_named(served: Running, field: str, value: object, words: str) -> None:
    error = error_of(complete(served, **{field: value}))
    assert words in error["message"]
    assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("top_logprobs", 2),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_would_change_a_chat_is_refused(served: Running, field: str, value: object) -> None:
    assert error_of(chat(served, **{field: value}))["param"] == field


def test_what_changes_nothing_is_accepted(served: Running) -> None:
    answer = chat(
        served,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        frequency_penalty=0.0,
        logit_bias={},
        n=None,
        stop=None,
        seed=None,
        parallel_tool_calls=True,
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"{}"])
def test_bodies_that_are_none(served: Running, body: bytes) -> None:
    with served.http() as http:
        error_of(http.post("/v1/completions", content=body))


def test_paths_and_methods_that_are_none(served: Running) -> None:
    with served.http() as http:
        error_of(http.get("/v1/nothing"), 404)
        error_of(http.get("/v1/completions"), 405)


# -- around it


def test_models_and_tokens(served: Running) -> None:
    with served.http() as http:
        card = http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == (MODEL, 400)
        assert http.post("/tokenize", json={"prompt": "hé"}).json() == {
            "count": 3,
            "max_model_len": 400,
            "tokens": [*"hé".encode()],
        }
        turns = [{"role": "user", "content": "hi"}]
        assert http.post("/tokenize", json={"messages": turns}).json()["tokens"] == [*b"<user>hi\n<assistant>"]
        assert http.post("/detokenize", json={"tokens": [*b"hello"]}).json() == {"prompt": "hello"}
        error_of(http.post("/tokenize", json={}))
        error_of(http.post("/detokenize", json={"tokens": [5000]}))


def test_one_model_by_its_name(served: Running) -> None:
    with served.client() as client:
        assert client.models.retrieve(MODEL).id == MODEL
    with served.http() as http:
        error = error_of(http.get("/v1/models/another/one"), 404)
    assert error["code"] == "model_not_found"
    assert "'another/one' is not served here" in error["message"]


@pytest.mark.parametrize("fields", [{"top_k": 2**63}, {"stream": True, "prompt_logprobs": 1}], ids=str)
def test_what_cannot_be_computed_is_refused_before_it_has_neighbours(served: Running, fields: dict[str, Any]) -> None:
    error = error_of(complete(served, **fields))
    assert next(reversed(fields)) in error["message"]


def test_request_ids_go_through(served: Running) -> None:
    with served.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        assert len(http.get("/health").headers["x-request-id"]) == 32
        assert len(http.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"]) == 32


def test_salts_keep_apart(served: Running) -> None:
    def cached(**fields: str) -> int:
        answer = complete(served, prompt="a prompt that others have sent", **fields).json()
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a"), cached(), cached()] == [
        0,
        0,
        28,
        0,
        28,
    ]


def test_metrics_and_resets() -> None:
    with running() as served, served.http() as http:
        for _ in range(2):
            complete(served, prompt="counted and counted again", max_tokens=5)
        figures = figures_of(http)
        assert figures["kvpool_prefix_cache_queries_total"] == 50
        assert figures["kvpool_prefix_cache_hits_total"] == 24
        assert figures["kvpool_generated_tokens_total"] == 10
        assert figures["kvpool_time_to_first_token_seconds_count"] == 2
        assert figures["kvpool_inter_token_seconds_count"] == 8
        assert figures['kvpool_requests_total{end="length"}'] == 2
        assert figures["kvpool_cache_usage_ratio"] == 0
        assert figures["kvpool_requests_running"] == figures["kvpool_requests_waiting"] == 0
        assert "kvpool_preemptions_total" in figures
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert complete(served, prompt="counted and counted again").json()["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0
        }


def figures_of(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_reset_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    asked: list[bool] = []
    ask = EngineLoop.reset_prefix_cache

    def counted(loop: EngineLoop, *, preempt_running: bool = False) -> Future[bool]:
        try:
            return ask(loop, preempt_running=preempt_running)
        finally:
            asked.append(preempt_running)

    monkeypatch.setattr(EngineLoop, "reset_prefix_cache", counted)
    with running(worker, cache) as served, ThreadPoolExecutor() as aside, served.http() as http:

        def reset(query: str) -> Future[httpx.Response]:
            """Is answered between two steps, and so after the one that is held."""
            return aside.submit(httpx.post, f"{served.url}/reset_prefix_cache{query}", timeout=60)

        body = {"prompt": "long", "max_tokens": 50, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            worker.allow(1)
            lines = answer.iter_lines()
            next(lines)
            refused = reset("")
            eventually(lambda: asked == [False])
            forced = reset("?reset_running_requests=true")
            eventually(lambda: asked == [False, True])
            worker.let_go()
            error_of(refused.result(), 409)
            assert forced.result().json() == {"success": True}
            list(lines)


def test_health_tells_that_the_worker_cannot_be_started() -> None:
    cache = KVCacheManager(100, 4)
    worker = FailingWorker(ToyWorker(cache), {n: WorkerDied("no memory", at_start=True) for n in (1, 2)})
    with running(worker, cache) as served, served.http() as http:
        assert error_of(complete(served, prompt="x"), 503)["code"] == "aborted"
        assert http.get("/health").status_code == 503
        assert complete(served, prompt="x").status_code == 200
        assert http.get("/health").status_code == 200


def test_only_the_admin_takes_the_entries_of_all() -> None:
    reset = "/reset_prefix_cache"
    as_one, as_admin = ({"Authorization": f"Bearer {key}"} for key in ("one", "root"))
    with running(config=ServerConfig(MODEL, api_keys=("one",), admin_key="root")) as served, served.http() as http:
        error_of(http.post(reset), 401)
        assert error_of(http.post(reset, headers=as_one), 403)["code"] == "admin_key_needed"
        assert http.post(reset, headers=as_admin).json() == {"success": True}
        assert http.get("/v1/models", headers=as_admin).status_code == 200
    with running(config=ServerConfig(MODEL, api_keys=("one",))) as served, served.http() as http:
        error_of(http.post(reset, headers=as_one), 403)
    with running(config=ServerConfig(MODEL, admin_key="root")) as served, served.http() as http:
        assert http.get("/v1/models").status_code == 200
        error_of(http.post(reset), 403)
        assert http.post(reset, headers=as_admin).json() == {"success": True}


def test_a_body_that_does_not_come() -> None:
    with running(config=ServerConfig(MODEL, timeout_s=0.5)) as served:
        address = served.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=60) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert half.recv(4096).startswith(b"HTTP/1.1 504 ")


def test_what_waits_to_be_read_has_a_limit() -> None:
    held, started = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text == "slow":
                started.set()
                held.wait(60)
            return super().encode(text, add_special_tokens=add_special_tokens)

    with running(tokenizer=Slow(), max_waiting=1) as served, served.http() as http, ThreadPoolExecutor(1) as pool:
        try:
            slow = pool.submit(http.post, "/tokenize", json={"prompt": "slow"})
            assert started.wait(60)
            assert error_of(http.post("/tokenize", json={"prompt": "x"}), 429)["code"] == "queue_full"
        finally:
            held.set()
        assert slow.result().json()["count"] == 4
        assert http.post("/tokenize", json={"prompt": "x"}).json()["count"] == 1


def test_keys() -> None:
    with running(config=ServerConfig(MODEL, api_keys=("one", "two"))) as served, served.http() as http:
        error = error_of(http.post("/v1/completions", json={"prompt": "x"}), 401)
        assert error["type"] == "authentication_error"
        for wrong in ("Bearer none", "Bearer", "one", "Basic one"):
            error_of(http.get("/v1/models", headers={"Authorization": wrong}), 401)
        assert http.get("/health").status_code == 200
        cached = []
        for key in ("one", "two", "one"):
            answer = http.post(
                "/v1/completions",
                json={"prompt": "the same prompt of both", "max_tokens": 2},
                headers={"Authorization": f"Bearer {key}"},
            )
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 20]


def test_salts_can_be_required() -> None:
    with running(config=ServerConfig(MODEL, requires_cache_salt=True)) as served:
        assert error_of(complete(served))["param"] == "cache_salt"
        assert complete(served, cache_salt="mine").status_code == 200


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_that_is_too_large(is_announced: bool) -> None:
    content = json.dumps({"prompt": "x" * 300_000}).encode()
    with running(config=ServerConfig(MODEL, max_body_bytes=100_000)) as served, served.http() as http:
        error = error_of(http.post("/v1/completions", content=content if is_announced else iter([content])), 413)
        assert "100000" in error["message"]


def test_too_many_waiting() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache, max_num_seqs=1, max_waiting=3) as served:
        with (
            served.http() as http,
            http.stream("POST", "/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True}),
        ):
            answer = complete(served)
            assert error_of(answer, 429)["type"] == "rate_limit_error"
            assert answer.headers["retry-after"] == "1"
            assert "3 requests wait" in answer.json()["error"]["message"]
        worker.let_go()
        eventually(lambda: served.engine.num_waiting == 0)
        assert complete(served).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(stream: bool) -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache, config=ServerConfig(MODEL, timeout_s=0.2)) as served:
        answer = complete(served, stream=stream, max_tokens=100)
        error = events_of(answer)[-1]["error"] if stream else error_of(answer, 504)
        assert error["code"] == "timeout"
        assert "0.2 s" in error["message"]
        worker.let_go()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(stream: bool) -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache) as served:
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.url, timeout=0.5) as http:
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1000, "stream": stream})
        eventually(lambda: served.engine.num_streams == 0)
        worker.let_go()
        eventually(lambda: cache.num_live_requests == 0)
        assert served.engine.metrics.requests.labels("aborted")._value.get() == 1


def test_a_stop_lets_requests_end() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache) as served, served.http() as http:
        body = {"prompt": "go on", "max_tokens": 20, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            served.server.should_exit = True
            eventually(lambda: not served.engine.is_serving)
            worker.let_go()
            answer.read()
            assert streamed_text(answer)[0] == continued("go on", 20)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{served.url}/health", timeout=60)


def test_a_stop_waits_no_longer_than_told() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache, config=ServerConfig(MODEL, drain_s=0.2)) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "go on", "stream": True}) as answer:
            served.server.should_exit = True
            answer.read()
            assert events_of(answer)[-1]["error"]["code"] == "aborted"
        worker.let_go()
