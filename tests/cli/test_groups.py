"""Groups of layers on the command line: how they are written, what is refused, what reports say of them."""

import json
from pathlib import Path

import pytest

from kvpool import ChunkedLocal, ConfigError, FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.cli.layers import HOW, read_groups
from kvpool.cli.main import main

FULL = FullAttention()
SMALL = ("replay", "--workload", "chat", "--requests", "40", "--num-blocks", "3000")


def reports(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    """What runs of a small workload print with --json: one object a line."""
    assert main([*SMALL, *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a run prints for people, without its line breaks."""
    assert main([*SMALL, *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that says why nothing was run."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# -- how groups are written


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("full", [FULL]),
        ("full/32", [FullAttention(32)]),
        ("3*full", [FULL] * 3),
        ("window:1024", [SlidingWindow(1_024)]),
        ("window:1_024/16", [SlidingWindow(1_024, block_size=16)]),
        ("window:128+4", [SlidingWindow(128, num_sinks=4)]),
        ("2*window:128+4/8", [SlidingWindow(128, num_sinks=4, block_size=8)] * 2),
        ("chunk:8192", [ChunkedLocal(8_192)]),
        ("chunk:64/32", [ChunkedLocal(64, block_size=32)]),
        ("state", [StateSpace()]),
        ("state:512", [StateSpace(512)]),
        ("state:0", [StateSpace(0)]),
        ("state:none/16", [StateSpace("none", block_size=16)]),
        ("full,5*window:1024", [FULL, *[SlidingWindow(1_024)] * 5]),
        (" full , 2*state , full/8", [FULL, StateSpace(), StateSpace(), FullAttention(8)]),
    ],
)
def test_groups_are_kinds_with_counts_and_block_sizes(text: str, groups: list[LayerKind]) -> None:
    assert read_groups(text) == tuple(groups)


MALFORMED = [
    *("", ",", "full,", ",full", "full,,full", "FULL", "cross", "sliding:4", "full window:4", "full:4", "full+2"),
    *(
        "window",
        "window:",
        "window:none",
        "window:x",
        "window:4+",
        "window:+4",
        "window:-4",
        "window:4.5",
        "window:4+x",
    ),
    *("chunk", "chunk:", "chunk:none", "chunk:8+2", "state+2", "state:16+2", "state:all", "state:-16"),
    *("2*", "*full", "x*full", "-1*full", "2**full", "2full", "full/", "full/x", "full/-8", "full/8/8"),
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_part_is_named_with_how_it_is_written(text: str) -> None:
    """Wherever the part stands among others."""
    for whole in (text, f"full,{text}", f"{text},state"):
        with pytest.raises(ConfigError) as refused:
            read_groups(whole)
        message = str(refused.value)
        assert message.startswith("--groups: ")
        assert message.endswith(f" is no group: {HOW}")
        part = message.removeprefix("--groups: ").removesuffix(f" is no group: {HOW}")
        assert part in [repr(own) for own in text.split(",")]


@pytest.mark.parametrize("text", ["sliding:4", "window", "full/", "2*"])
def test_a_malformed_part_is_one_line_on_the_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, *SMALL, "--groups", f"full,{text}") == f"kvpool: --groups: {text!r} is no group: {HOW}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups", "0*full"], "no groups"),
        (["--groups", "257*full"], "--groups: '257*full' makes it more than 256: at most 256 share a pool"),
        (["--groups", "full,200*state,56*full"], "--groups: '56*full' makes it more than 256"),
        (["--groups", "window:0"], "window is 0: "),
        (["--groups", "chunk:0"], "chunk_size is 0: "),
        (["--groups", "full/0"], "block_size is 0: "),
        (["--groups", "chunk:24"], "chunk_size 24 is no multiple of the block size 16: 12 is the largest"),
        (["--groups", "full,state:24"], "checkpoints is every 24 tokens, and hits end at multiples of 16 only: 16 or"),
        (["--groups", "full/2147483647,full/4"], "block sizes [4, 2147483647] meet every 8589934588 tokens only"),
        (["--groups", "full,window:64", "--publication", "24"], "publication is every 24 tokens, .* 16 or 32 work"),
        (["--groups", "full,window:64", "--publication", "-16"], "publication is '-16': ranked, every, dense, or an"),
        (["--groups", "full,window:64", "--publication", "all"], "publication is 'all': ranked, every, dense, or an"),
        (["--sweep", "publication=ranked,all"], "publication is 'all': ranked, every, dense, or an interval in tokens"),
    ],
)
def test_what_cannot_work_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = mistake(capsys, *SMALL, *arguments)
    first, _, last = message.partition(".*")
    assert first in err
    assert last in err


def test_a_huge_number_of_groups_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at most 256" in mistake(capsys, *SMALL, "--groups", "99999999999999999999*full")


# -- size by memory


def test_memory_is_not_divided_among_several_groups(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("replay", "--workload", "chat", "--requests", "9", "--kv-gib", "1", "--bytes-per-token", "131072")
    err = mistake(capsys, *size, "--groups", "full,window:64")
    assert "--kv-gib and several --groups: how wide they are is in a model's file, so give --config FILE" in err
    assert main([*size, "--groups", "window:64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_blocks"] == 512


def test_memory_is_divided_by_the_blocks_of_the_only_group(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("replay", "--workload", "chat", "--requests", "9", "--kv-gib", "1", "--bytes-per-token", "131072")
    assert main([*size, "--groups", "full/32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_blocks"] == 256


# -- what reports say


def test_json_names_the_groups_and_what_they_mean_for_hits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--groups", "full,2*window:64+4/32,chunk:96", "--publication", "96", "--drop-last-block")
    (report,) = reports(capsys, *arguments)
    window = "sliding window 64 with 4 sinks in blocks of 32"
    assert report["groups"] == ["full attention", window, window, "chunks of 96"]
    assert report["publication"] == 96
    assert (report["alignment"], report["smallest_hit"], report["block_size"]) == (32, 64, 16)
    assert isinstance(report["hit_tokens"], int)
    assert report["hit_tokens"] % 32 == 0


def test_json_of_a_plain_cache(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = reports(capsys)
    names = ("groups", "publication", "alignment", "smallest_hit")
    assert [report[name] for name in names] == [["full attention"], "ranked", 16, 16]


def test_json_where_no_prefix_can_ever_hit(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = reports(capsys, "--groups", "full,state:none")
    assert (report["smallest_hit"], report["hit_tokens"], report["ideal_hit_tokens"]) == (None, 0, 0)


def test_a_draft_model_s_block_is_dropped_from_hits(capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt that hit hits a block less, and so does the cache without end."""
    (whole,), (dropped,) = reports(capsys), reports(capsys, "--drop-last-block")
    for name in ("hit_tokens", "ideal_hit_tokens"):
        more, less = whole[name], dropped[name]
        assert isinstance(more, int)
        assert isinstance(less, int)
        assert 0 < more - less <= 16 * 40
        assert (more - less) % 16 == 0


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--groups", "full,5*window:1024"],
            [
                "6 groups: full attention, 5 x sliding window 1,024; publication ranked",
                "hits end at multiples of 16 tokens; smallest prefix that can hit: 16 tokens",
            ],
        ),
        (
            ["--groups", "full,window:64/48", "--publication", "dense", "--drop-last-block"],
            [
                "2 groups: full attention, sliding window 64 in blocks of 48; publication dense",
                "hits end at multiples of 48 tokens; smallest prefix that can hit: 96 tokens",
            ],
        ),
        (["--groups", "window:64"], ["1 group: sliding window 64; publication ranked"]),
        (["--groups", "full/32"], ["cache mode, 3,000 blocks of 32 tokens, lru"]),
        (["--drop-last-block"], ["hits end at multiples of 16 tokens; smallest prefix that can hit: 32 tokens"]),
        (
            ["--groups", "full,state:none"],
            [
                "2 groups: full attention, state without checkpoints; publication ranked",
                "no prefix can ever hit: a group of states keeps no checkpoints",
            ],
        ),
    ],
)
def test_a_report_says_where_hits_end(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *arguments)
    for line in lines:
        assert line in text


def test_a_report_of_one_full_group_says_nothing_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    for word in ("group", "publication", "hits end", "smallest"):
        assert word not in text


def test_where_layers_allow_no_hit_the_traffic_is_not_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No prompt repeats a full block" not in shown(capsys, "--groups", "full,state:none")


# -- sweeps


def test_publication_can_be_swept(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--groups", "full,window:64", "--sweep", "publication=ranked,dense,0", "--workers", "2")
    swept = reports(capsys, *arguments)
    assert [report["publication"] for report in swept] == ["ranked", "dense", 0]
    assert [report["sweep"] for report in swept] == [{"publication": value} for value in ("ranked", "dense", 0)]
    hits = [report["hit_tokens"] for report in swept]
    (alone,) = reports(capsys, "--groups", "full,window:64", "--publication", "0")
    assert hits[2] == alone["hit_tokens"] != hits[1] == hits[0], "boundaries alone serve fewer prompts"


def test_the_table_of_a_sweep_has_a_column_for_the_publication(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--groups", "full,window:64", "--sweep", "publication=ranked,dense,0", "--workers", "2")
    assert "2 groups: full attention, sliding window 64; publication as in each row" in text
    for cell in ("ranked", "dense", "3 runs", "hits end at multiples of 16 tokens"):
        assert cell in text
    text = shown(capsys, "--groups", "full,window:64", "--sweep", "seed=1,2", "--workers", "2")
    assert "publication ranked" in text


def test_a_sweep_of_block_sizes_does_not_tell_the_first_one_s_alignment_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "--drop-last-block", "--sweep", "block_size=16,32", "--workers", "2")
    assert "hits end at multiples of 16 tokens; smallest prefix that can hit: 32 tokens" not in text


# -- engine mode


def test_groups_run_in_an_engine_with_every_value_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 1536, "output_length": 9, "hash_ids": [0, 1, n + 2]} for n in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = ("--block-size", "64", "--num-blocks", "200", "--mode", "engine", "--check", "--json")
    assert main(["replay", str(path), *size, "--groups", "full,2*window:256,state"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["timing"]["num_finished"] == 8
    assert 0 < report["hit_tokens"] <= report["ideal_hit_tokens"]
