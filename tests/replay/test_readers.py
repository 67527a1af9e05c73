"""Trace readers: what each format says, what is wrong with a line or a file, and the facts of the real traces."""

import gzip
import json
import os
import pickle
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, TraceError
from kvpool.replay.readers import Trace, open_trace
from kvpool.replay.trace import TraceRequest

SHARED = Path(os.environ.get("KVPOOL_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}
BAILIAN = {
    "chat_id": 10,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 33,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [5, 6, 7],
}
TAU = {"timestamp": 0.5, "session_id": 3, "turn": 0, "input_length": 40, "output_length": 7, "hash_runs": [[0, 2]]}
TOKENS = {
    "input_toks": 3,
    "output_toks": 2,
    "arrival_time_ns": 1_500_000_000,
    "input_tok_ids": [7, 8, 9],
    "output_tok_ids": [1, 2],
}
AGENT_REQUEST = {"t": 0.0, "type": "n", "in": 200, "out": 5, "hash_runs": [[1, 3]]}
AGENT = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [AGENT_REQUEST]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
ONE_OF_EACH = {"mooncake": MOONCAKE, "bailian": BAILIAN, "tau": TAU, "token-ids": TOKENS, "agent-sessions": AGENT}


def written(folder: Path, text: str | bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def jsonl(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def opened(folder: Path, *records: dict[str, Any], skip_bad: bool = False, session_gap_s: float = 60.0) -> Trace:
    return open_trace(written(folder, jsonl(records)), skip_bad=skip_bad, session_gap_s=session_gap_s)


def error_of(trace: Trace) -> str:
    with pytest.raises(TraceError) as caught:
        list(trace)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What each format says


def test_mooncake(tmp_path: Path) -> None:
    trace = opened(tmp_path, MOONCAKE | {"tenant": "t"})
    assert (trace.name, trace.format, trace.block_size) == ("trace.txt", "mooncake", 512)
    assert list(trace) == [TraceRequest("1", 1.5, 1030, 7, block_ids=[0, 1, 2], tenant="t")]


def test_bailian_session_is_the_root_of_the_parents(tmp_path: Path) -> None:
    chats = [(10, -1, 1), (11, 10, 2), (12, -1, 1), (13, 11, 3), (14, 99, 4), (15, 14, 5)]
    trace = opened(tmp_path, *(BAILIAN | {"chat_id": c, "parent_chat_id": p, "turn": t} for c, p, t in chats))
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert [(r.request_id, r.session, r.turn) for r in trace] == [
        ("10", "10", 1),
        ("11", "10", 2),
        ("12", "12", 1),
        ("13", "10", 3),
        ("14", "99", 4),
        ("15", "99", 5),
    ]
    first = next(iter(trace))
    assert (first.arrival_s, first.num_prompt_tokens, first.block_ids) == (0.5, 33, [5, 6, 7])


def test_tau_unpacks_runs(tmp_path: Path) -> None:
    trace = opened(tmp_path, TAU | {"input_length": 80, "hash_runs": [[0, 2], [9, 3]], "user": 8})
    assert (trace.format, trace.block_size) == ("tau", 16)
    assert list(trace) == [
        TraceRequest("3/0", 0.5, 80, 7, block_ids=[0, 1, 9, 10, 11], tenant="8", session="3", turn=0)
    ]


def test_token_ids(tmp_path: Path) -> None:
    trace = opened(tmp_path, TOKENS)
    assert (trace.format, trace.block_size) == ("token-ids", None)
    assert list(trace) == [TraceRequest("1", 1.5, 3, 2, prompt_token_ids=[7, 8, 9], output_token_ids=[1, 2])]


def test_azure_counts_from_its_first_row(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path, AZURE + "2023-11-16 18:15:50.9951690,396,109\r\n"))
    assert (trace.format, trace.block_size) == ("azure-csv", None)
    assert list(trace) == [TraceRequest("2", 0.0, 374, 44), TraceRequest("3", 4.314579, 396, 109)]


def test_azure_with_time_zones_and_columns_in_another_order(tmp_path: Path) -> None:
    rows = "GeneratedTokens,TIMESTAMP,ContextTokens\n1,2024-05-10 00:00:00.5+00:00,9\n2,2024-05-10 00:00:02+00:00,8\n"
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in open_trace(written(tmp_path, rows))] == [
        (0.0, 9, 1),
        (1.5, 8, 2),
    ]


def test_agent_session(tmp_path: Path) -> None:
    plain = {"t": 2.0, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 9]}
    trace = opened(tmp_path, AGENT | {"requests": [AGENT_REQUEST, plain], "tenant": "t"})
    assert (trace.format, trace.block_size) == ("agent-sessions", 64)
    assert list(trace) == [
        TraceRequest("a/0", 0.0, 200, 5, block_ids=[1, 2, 3], tenant="t", session="a", turn=0),
        TraceRequest("a/1", 2.0, 130, 1, block_ids=[1, 9], tenant="t", session="a", turn=1),
    ]


def test_sub_agent_counts_time_from_its_own_start_and_shares_its_sessions_ids(tmp_path: Path) -> None:
    inner = [AGENT_REQUEST | {"t": t, "out": out} for t, out in ((0.0, 11), (6.0, 12))]
    outer = [AGENT_REQUEST, {"t": 10.0, "type": "subagent", "requests": inner}, AGENT_REQUEST | {"t": 12.0}]
    requests = list(opened(tmp_path, AGENT | {"requests": outer}))
    assert [(r.arrival_s, r.num_output_tokens, r.turn) for r in requests] == [
        (0.0, 5, 0),
        (10.0, 11, 1),
        (12.0, 5, 2),
        (16.0, 12, 3),
    ]
    assert {tuple(r.block_ids or ()) for r in requests} == {(1, 2, 3)}


def test_agent_sessions_overlap_in_time_and_never_in_ids(tmp_path: Path) -> None:
    def session(name: str, *times: float) -> dict[str, Any]:
        return AGENT | {"id": name, "requests": [AGENT_REQUEST | {"t": t} for t in times]}

    trace = opened(tmp_path, session("a", 0, 10, 25), session("b", 0, 5), session("c", 0), session_gap_s=10.0)
    assert [(r.request_id, r.arrival_s) for r in trace] == [
        ("a/0", 0),
        ("a/1", 10),
        ("b/0", 10),
        ("b/1", 15),
        ("c/0", 20),
        ("a/2", 25),
    ]
    assert {r.session: r.block_ids for r in trace} == {"a": [1, 2, 3], "b": [5, 6, 7], "c": [9, 10, 11]}


def test_agent_sessions_are_opened_when_their_time_comes(tmp_path: Path) -> None:
    requests = iter(opened(tmp_path, AGENT, AGENT | {"id": "b"}, AGENT | {"id": "a"}))
    assert next(requests).request_id == "a/0", "the bad third session has not been looked at"
    with pytest.raises(TraceError, match=":3: session a was given by an earlier line"):
        next(requests)


def test_records_may_state_their_block_size(tmp_path: Path) -> None:
    trace = opened(tmp_path, MOONCAKE | {"block_size": 1024, "hash_ids": [0, 1]})
    assert (trace.block_size, len(list(trace))) == (1024, 1)


@pytest.mark.parametrize(("input_length", "hash_ids"), [(1024, [0, 1]), (1025, [0, 1]), (1025, [0, 1, 2]), (7, [])])
def test_ids_stand_for_the_full_or_the_started_blocks(tmp_path: Path, input_length: int, hash_ids: list[int]) -> None:
    record = MOONCAKE | {"input_length": input_length, "hash_ids": hash_ids}
    assert [r.block_ids for r in opened(tmp_path, record)] == [hash_ids]


# Reading


@pytest.mark.parametrize("format", ONE_OF_EACH)
def test_gzip_is_told_by_content_and_a_trace_can_be_read_again(tmp_path: Path, format: str) -> None:
    text = jsonl([ONE_OF_EACH[format]])
    plain = open_trace(written(tmp_path, text, "plain.gz"))
    packed = open_trace(written(tmp_path, gzip.compress(text.encode()), "packed.jsonl"))
    assert plain.format == packed.format == format
    assert list(plain) == list(packed) == list(packed)


@pytest.mark.parametrize("format", ONE_OF_EACH)
def test_unknown_fields_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path, format: str) -> None:
    record = ONE_OF_EACH[format]
    text = b"\xef\xbb\xbf" + f"\n  \n{json.dumps(record | {'more': {'x': [1]}})}\r\n\n".encode()
    assert len(list(open_trace(written(tmp_path, text)))) == 1


def test_pickled_trace_reads_the_same(tmp_path: Path) -> None:
    trace = opened(tmp_path, MOONCAKE, MOONCAKE | {"input_length": 0}, skip_bad=True)
    copy = pickle.loads(pickle.dumps(trace))
    assert list(copy) == list(trace)
    assert (copy.name, copy.format, copy.num_skipped) == (trace.name, trace.format, 1)


def test_a_pass_holds_one_line_at_a_time(tmp_path: Path) -> None:
    path = written(tmp_path, jsonl(MOONCAKE | {"timestamp": n, "padding": "x" * 1000} for n in range(5000)))
    tracemalloc.start()
    assert sum(1 for _ in open_trace(path)) == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 5


# Bad lines

BAD = {
    "not JSON": (MOONCAKE, '{"timestamp": 1,', "not JSON"),
    "not UTF-8": (MOONCAKE, '{"tenant": "\udcff"}', "not JSON"),
    "not an object": (MOONCAKE, "[1]", "Expected `object`"),
    "NaN": (MOONCAKE, json.dumps(MOONCAKE | {"timestamp": float("nan")}), "not JSON"),
    "missing field": (MOONCAKE, json.dumps({"timestamp": 2000, "input_length": 3, "hash_ids": []}), "`output_length`"),
    "missing ids": (TAU, json.dumps({k: v for k, v in TAU.items() if k != "hash_runs"}), "`hash_ids` (or `hash_runs`)"),
    "wrong type": (MOONCAKE, MOONCAKE | {"input_length": "3"}, "Expected `int`, got `str` - at `$.input_length`"),
    "tenant": (MOONCAKE, MOONCAKE | {"tenant": [1]}, "`$.tenant`"),
    "empty prompt": (MOONCAKE, MOONCAKE | {"input_length": 0, "hash_ids": []}, "a prompt of 0 tokens: must be 1"),
    "negative prompt": (MOONCAKE, MOONCAKE | {"input_length": -5, "hash_ids": []}, "a prompt of -5 tokens"),
    "negative output": (MOONCAKE, MOONCAKE | {"output_length": -1}, "an output of -1 tokens: must be 0"),
    "deep nesting": (MOONCAKE, '{"x": ' + "[" * 100_000, "not JSON"),
    "endless number": (MOONCAKE, '{"timestamp": 2000, "input_length": ' + "9" * 5000 + "}", "out of range"),
    "absurd prompt": (TAU, TAU | {"input_length": 16 * 10**12, "hash_runs": [[0, 10**12]]}, "must be 1 to 100,000,000"),
    "too few ids": (MOONCAKE, MOONCAKE | {"hash_ids": [0]}, "1 block ids for 1030 tokens; blocks of 512 give 2 or 3"),
    "too many ids": (TAU, TAU | {"input_length": 32, "hash_runs": [[0, 3]]}, "blocks of 16 give 2;"),
    "endless run": (TAU, TAU | {"hash_runs": [[0, 10**15]]}, "1000000000000000 block ids for 40 tokens"),
    "empty run": (TAU, TAU | {"hash_runs": [[0, 0], [0, 2]]}, "run [0, 0]"),
    "negative run": (TAU, TAU | {"hash_runs": [[-1, 2]]}, "run [-1, 2]"),
    "long run": (TAU, TAU | {"hash_runs": [[0, 2, 3]]}, "Expected `array` of length 2"),
    "negative id": (MOONCAKE, MOONCAKE | {"hash_ids": [0, -1]}, "Expected `int` >= 0 - at `$.hash_ids[1]`"),
    "id twice": (MOONCAKE, MOONCAKE | {"hash_ids": [4, 9, 4]}, "block id 4 comes twice in one prompt"),
    "id of more than 128 bits": (MOONCAKE, MOONCAKE | {"hash_ids": [0, 1, 2**128]}, f"block id {2**128} is too large"),
    "run of more than 128 bits": (TAU, TAU | {"hash_runs": [[2**128 - 1, 2]]}, f"block id {2**128} is too large"),
    "runs that overlap": (TAU, TAU | {"hash_runs": [[5, 1], [5, 1]]}, "block id 5 comes twice in one prompt"),
    "empty tenant": (MOONCAKE, MOONCAKE | {"tenant": ""}, "the tenant or user is an empty text"),
    "negative token": (TOKENS, TOKENS | {"output_tok_ids": [4, -1]}, "Expected `int` >= 0 - at `$.output_tok_ids[1]`"),
    "earlier": (MOONCAKE, MOONCAKE | {"timestamp": 1400}, "arrives at 1.4 s, after a request that arrives at 1.5 s"),
    "chat_id twice": (BAILIAN, BAILIAN, "chat_id 10 was given to an earlier line"),
    "turn twice": (TAU, TAU, "turn 0 of session 3 was given by an earlier line"),
    "session twice": (AGENT, AGENT, "session a was given by an earlier line"),
    "other block size": (AGENT, AGENT | {"id": "b", "block_size": 32}, "block_size is 32, in a trace of 64"),
    "other scope": (AGENT, AGENT | {"id": "b", "hash_id_scope": "global"}, "hash_id_scope is 'global'"),
    "token count": (TOKENS, TOKENS | {"input_toks": 4}, "input_toks is 4, but there are 3 input_tok_ids"),
}


@pytest.mark.parametrize(("good", "bad", "problem"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, good: dict[str, Any], bad: Any, problem: str) -> None:
    text = bad if isinstance(bad, str) else json.dumps(bad)
    path = written(tmp_path, (jsonl([good]) + text + "\n").encode(errors="surrogateescape"))
    message = error_of(open_trace(path))
    assert message.startswith(f"{path}:2: ")
    assert problem in message
    assert "--skip-bad" in message
    trace = open_trace(path, skip_bad=True)
    assert [(len(list(trace)), trace.num_skipped) for _ in range(2)] == [(1, 1), (1, 1)]


BAD_ENTRIES = {
    "missing": ({"t": 0, "hash_ids": []}, "requests[1]: missing field `in` or `out`"),
    "ids": (AGENT_REQUEST | {"in": 500}, "requests[1]: 3 block ids for 500 tokens; blocks of 64 give 7 or 8"),
    "time": (AGENT_REQUEST | {"t": -1}, "requests[1]: a time of -1.0 s"),
    "nested": ({"t": 3, "requests": [AGENT_REQUEST | {"in": 0}]}, "requests[1]: requests[0]: a prompt of 0 tokens"),
    "type": (AGENT_REQUEST | {"out": "x"}, "`$.requests[1].out`"),
}


@pytest.mark.parametrize(("entry", "problem"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_request_makes_its_session_bad(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    records = [AGENT | {"requests": [AGENT_REQUEST, entry]}, AGENT | {"id": "b"}]
    assert problem in error_of(opened(tmp_path, *records))
    trace = opened(tmp_path, *records, skip_bad=True)
    assert ([(r.session, r.arrival_s) for r in trace], trace.num_skipped) == ([("b", 0.0)], 1)


BAD_ROWS = {
    "cells": ("2023-11-16 18:15:47,1\n", "2 cells, where the header has 3"),
    "date": ("yesterday,1,1\n", "TIMESTAMP is 'yesterday'"),
    "number": ("2023-11-16 18:15:47,1.5,1\n", "ContextTokens is '1.5'"),
    "zero": ("2023-11-16 18:15:47,0,1\n", "a prompt of 0 tokens"),
    "zone": ("2023-11-16 18:15:47+00:00,1,1\n", "time zone"),
    "earlier": ("2023-11-16 18:15:45.680590,1,1\n", "arrives at -1.0 s, after a request that arrives at 0.0 s"),
}


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, row: str, problem: str) -> None:
    path = written(tmp_path, AZURE + row)
    assert problem in error_of(open_trace(path))
    trace = open_trace(path, skip_bad=True)
    assert (len(list(trace)), trace.num_skipped) == (1, 1)


def test_a_time_before_the_start_is_bad(tmp_path: Path) -> None:
    assert "a time of -0.001 s: must be a finite number" in error_of(opened(tmp_path, MOONCAKE | {"timestamp": -1}))


def test_a_bad_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path, "{oops\n" + jsonl([MOONCAKE])), skip_bad=True)
    assert (trace.format, len(list(trace)), trace.num_skipped) == ("mooncake", 1, 1)


def test_all_lines_bad_is_no_request_and_all_counted(tmp_path: Path) -> None:
    trace = opened(tmp_path, MOONCAKE | {"input_length": 0}, skip_bad=True)
    assert (list(trace), trace.num_skipped) == ([], 1)


# Bad files


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (gzip.compress(b""), "is empty"),
        (b"PAR1\x00\x15\x04", "is binary (starts with b'PAR1"),
        (gzip.compress(b"\x00\x01"), "is binary"),
        (gzip.compress(jsonl([MOONCAKE]).encode())[:-12], "the gzip data is cut off after line"),
        (gzip.compress(jsonl([MOONCAKE]).encode())[:-8] + b"12345678", "the gzip data is damaged"),
        (b'{"a": 1, "b": 2}\n', "unknown format: a record with the fields a, b; known"),
        (b'[{"timestamp": 1}]\n', "unknown format: b'[{\"timestamp\": 1}]': Expected `object`"),
        (b"time,tokens\n1,2\n", "unknown format: b'time,tokens'"),
        (b"\n{\n", ":2: unknown format: b'{': not JSON (Input data was truncated)"),
        (b"[" * 100_000, "unknown format: b'[[["),
        (b"{}\n", "unknown format: a record with the fields (none)"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}\n', "needs a tokenizer: pass tokenizer=load_tokenizer("),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, problem: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        open_trace(path, skip_bad=True)
    assert str(caught.value).startswith(f"{path}:")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(written(tmp_path, '{"a": 1}'))
    for format in [*ONE_OF_EACH, "azure-csv", "chat"]:
        assert f"{format} (" in str(caught.value)


def test_no_file_a_folder_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file or directory"):
        open_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        open_trace(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a regular file"):
        open_trace(tmp_path / "pipe")


def test_a_header_alone_holds_no_requests(tmp_path: Path) -> None:
    assert "holds no requests" in error_of(open_trace(written(tmp_path, AZURE.splitlines()[0])))


def test_a_long_gzip_that_is_cut_off_ends_in_an_error(tmp_path: Path) -> None:
    records = (MOONCAKE | {"timestamp": n, "padding": os.urandom(100).hex()} for n in range(2000))
    trace = open_trace(written(tmp_path, gzip.compress(jsonl(records).encode())[:-1000]), skip_bad=True)
    assert "the gzip data is cut off after line" in error_of(trace)


@pytest.mark.parametrize("gap", [-1.0, float("nan"), float("inf")])
def test_a_gap_that_is_no_time(tmp_path: Path, gap: float) -> None:
    with pytest.raises(ConfigError, match="session_gap_s"):
        opened(tmp_path, AGENT, session_gap_s=gap)


# The real traces


def real(name: str) -> Trace:
    path = SHARED / "data" / "traces" / name
    if not path.exists():
        pytest.skip(f"no {path}: set KVPOOL_SHARED to the folder that holds data/traces")
    return open_trace(path)


def in_order(requests: list[TraceRequest]) -> bool:
    return requests == sorted(requests, key=lambda request: request.arrival_s)


def test_real_mooncake() -> None:
    requests = list(real("mooncake_conversation.jsonl"))
    ids = [block_id for request in requests for block_id in request.block_ids or ()]
    assert (len(requests), len(ids), len(set(ids))) == (12_031, 288_500, 182_790)
    assert in_order(requests)
    assert int(requests[-1].arrival_s) == 3_536


def test_real_tau() -> None:
    trace = real("tau_airline_blk16.jsonl.gz")
    requests = list(trace)
    ids = [block_id for request in requests for block_id in request.block_ids or ()]
    assert (len(requests), len(ids), len(set(ids))) == (2_454, 503_782, 36_663)
    assert (trace.block_size, len({request.session for request in requests})) == (16, 200)
    assert in_order(requests)


def test_real_agent_sessions() -> None:
    num_requests, num_ids, last_s = 0, 0, 0.0
    spans: dict[str | None, tuple[int, int]] = {}
    for request in real("coding_agent_sessions_blk64.jsonl.gz"):
        ids = request.block_ids
        assert ids is not None
        assert request.arrival_s >= last_s
        low, high = spans.get(request.session, (ids[0], ids[0]))
        spans[request.session] = (min(low, min(ids)), max(high, max(ids)))
        num_requests, num_ids, last_s = num_requests + 1, num_ids + len(ids), request.arrival_s
    assert (num_requests, num_ids, len(spans)) == (24_015, 47_061_278, 355)
    ordered = sorted(spans.values())
    assert all(high < low for (_, high), (low, _) in pairwise(ordered))


def test_real_token_ids() -> None:
    requests = list(real("vllm_run_rtx4090/workload_tokens.jsonl.gz"))
    assert len(requests) == 300
    assert requests[0].arrival_s == 0.046926808
    assert [len(requests[0].prompt_token_ids or ()), len(requests[0].output_token_ids or ())] == [2358, 531]


def test_real_azure() -> None:
    requests = list(real("azure2023_conv.csv"))
    assert (len(requests), requests[0].arrival_s) == (19_366, 0.0)
    assert in_order(requests)
