"""OpenAI's own client, unmodified, against the real server."""

from collections.abc import Iterator

import openai
import pytest
from tests.serving.served import MODEL, Running, running
from tests.serving.toy import continued


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


def test_errors_are_typed(served: Running) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match=r"temperature is 3.0: 0 to 2") as caught:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="'toy' is"):
        client.completions.create(model="other", prompt="x")
