"""One request of a trace, in this library's units, whatever the format it was written in.

Knows nothing of: file formats (`readers`), the cache, time other than arrival.
"""

from collections.abc import Sequence
from typing import NamedTuple


class TraceRequest(NamedTuple):
    """What a trace says of one request.

    `block_ids[i]` names prompt tokens [i * n, (i + 1) * n) together with all tokens before them, where n is the number
    of tokens in a block of that trace (`Trace.block_size`); the last id may stand for a partial block. Ids are unique
    in the whole trace: where a format numbers blocks within a session only, the reader has shifted each session to a
    range of its own.
    `prompt_token_ids` and `output_token_ids` are there when the trace has the tokens themselves.
    Without either, nothing is known of the content and no two requests share anything.
    `request_id` is unique in the whole trace: the trace's own name, else the number of the line.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    output_token_ids: Sequence[int] | None = None
    tenant: str | None = None
    session: str | None = None
    turn: int | None = None
