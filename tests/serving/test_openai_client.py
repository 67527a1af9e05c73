"""OpenAI's own client, unmodified, against the real server."""

from collections.abc import Iterator

import openai
import pytest
from tests.serving.served import MODEL, Running, eventually, running
from tests.serving.toy import FailingWorker, HeldWorker, ToyWorker, continued

from kvpool import KVCacheManager
from kvpool.errors import WorkerDied
from kvpool.serving.app import ServerConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as server:
        yield server


def test_it_completes(served: Running) -> None:
    answer = served.client().completions.create(model=MODEL, prompt="hello there", max_tokens=9, temperature=0)
    assert answer.choices[0].text == continued("hello there", 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 9, 20)


def test_it_streams(served: Running) -> None:
    chunks = list(
        served.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "tell me"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == continued("<user>tell me\n<assistant>", 12)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_it_reads_cached_token_counts(served: Running) -> None:
    prompt = "a prompt that is asked for twice"
    cached = []
    for _ in range(2):
        answer = served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        assert answer.choices[0].text == continued(prompt, 4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 28]


def test_it_cancels() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache) as served:
        stream = served.client().completions.create(model=MODEL, prompt="endless", max_tokens=1000, stream=True)
        worker.allow(5)
        assert len([next(stream) for _ in range(3)]) == 3
        stream.close()
        eventually(lambda: served.engine.num_streams == 0)
        worker.let_go()
        eventually(lambda: cache.num_live_requests == 0)
        assert worker.num_steps < 100


def test_it_asks_for_several_choices_with_logprobs_and_stops(served: Running) -> None:
    prompt = "<user>some\n<assistant>"
    whole = continued(prompt, 30, 11)
    answer = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "some"}],
        n=2,
        seed=11,
        stop=whole[20:23],
        max_tokens=30,
        logprobs=True,
        top_logprobs=2,
    )
    first, second = answer.choices
    assert first.message.content == whole[: whole.index(whole[20:23])]
    assert first.finish_reason == "stop"
    assert second.message.content == continued(prompt, 30, 12)
    assert second.logprobs is not None
    assert second.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in second.logprobs.content] == [2] * 30


def test_it_lists_models(served: Running) -> None:
    assert [model.id for model in served.client().models.list()] == [MODEL]


def test_its_raw_answers_have_request_ids(served: Running) -> None:
    client = served.client(default_headers={"X-Request-Id": "abc"})
    answer = client.completions.create(model=MODEL, prompt="x")
    assert answer._request_id == "abc"


def test_errors_are_typed(served: Running) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match=r"temperature is 3.0: 0 to 2") as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="'toy' is"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="not offered"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.APIStatusError) as too_large:
        client.completions.create(model=MODEL, prompt="x" * (17 << 20))
    assert too_large.value.status_code == 413


def test_a_full_queue_and_a_wrong_key_are_typed() -> None:
    cache = KVCacheManager(512, 4)
    worker = HeldWorker(ToyWorker(cache))
    with running(worker, cache, max_waiting=1, config=ServerConfig(MODEL, api_keys=("right",))) as served:
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="wrong").models.list()
        client = served.client(api_key="right")
        with client.completions.create(model=MODEL, prompt="x", stream=True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="y")
            assert caught.value.response.headers["retry-after"] == "1"
            worker.let_go()


def test_a_step_that_fails_is_told_to_whole_answers_and_to_streams() -> None:
    cache = KVCacheManager(512, 4)
    worker = FailingWorker(ToyWorker(cache), {1: RuntimeError("no memory"), 4: RuntimeError("no memory")})
    with running(worker, cache) as served:
        client = served.client()
        with pytest.raises(openai.InternalServerError, match="could not be computed"):
            client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.APIError, match="could not be computed"):
            list(client.completions.create(model=MODEL, prompt="x", stream=True))
        answer = client.completions.create(model=MODEL, prompt="x", temperature=0)
        assert answer.choices[0].text == continued("x", 16)


def test_a_worker_that_dies_once_is_not_noticed() -> None:
    cache = KVCacheManager(512, 4)
    with running(FailingWorker(ToyWorker(cache), {9: WorkerDied("killed")}), cache) as served:
        answer = served.client().completions.create(model=MODEL, prompt="x", temperature=0, max_tokens=20)
        assert answer.choices[0].text == continued("x", 20)
