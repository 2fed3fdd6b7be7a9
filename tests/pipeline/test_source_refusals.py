"""The source decides by the code of an error line, never by its sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit.pipeline import DataLoss, StreamUnavailable
from muxkit.pipeline.source.client import NoStatus
from muxkit.pipeline.source.offsets import Span
from tests.pipeline._source_place import ids, lines, place, scripted
from tests.pipeline._source_servers import ONE

if TYPE_CHECKING:
    from typing import Any

    import trio
    from trio.testing import MockClock


async def refused(name: str, line: dict[str, object], then: list[int]) -> list[int]:
    """What a reader of messages 1 to 2 has from a server that says `line` first, and serves `then` after it."""

    async def act(requests: list[dict[str, Any]], stream: trio.abc.Stream) -> None:
        first = len(requests) == 1
        await stream.send_all(lines(line) if first else lines(*({"id": id, "data": 0} for id in then)))

    async with place(f"{name}-options") as there, scripted(name, act) as url:
        return await ids(there.client(failOnDataLoss="true"), Span(ONE, url, 0, 2))


@pytest.mark.parametrize("code", ["gone", "beyond", "unknown"])
async def test_a_code_of_loss_is_a_loss_in_whatever_words(code: str, autojump_clock: MockClock) -> None:
    with pytest.raises(DataLoss, match="comme il faut") as raised:
        await refused(code, {"error": "comme il faut", "code": code, "acknowledged": 17}, [])
    assert raised.value.acknowledged == (17 if code == "gone" else None)


@pytest.mark.parametrize("code", ["busy", "unavailable"])
async def test_a_code_of_trouble_is_tried_again_in_whatever_words(code: str, autojump_clock: MockClock) -> None:
    assert await refused(code, {"error": "message 3 has expired", "code": code}, [1, 2]) == [1, 2]


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize("more", [{}, {"code": "from a newer server"}, {"code": 7}])
async def test_a_sentence_without_a_code_is_never_taken_for_a_loss(
    more: dict[str, object], autojump_clock: MockClock
) -> None:
    """Was: The Spark source told data loss from trouble by regular expressions over the sentences of an error line, so
    another wording was another decision.
    """
    text = "session has expired; state 0 is before message 9, which was acknowledged"
    with pytest.raises(StreamUnavailable, match="refused: session has expired"):
        await refused("plain", {"error": text} | more, [])


async def test_what_our_server_says_has_its_codes(autojump_clock: MockClock) -> None:
    async with place() as there:
        await there.feed(ONE, 20)
        await there.store.ack(ONE, 17)
        client = there.client()
        with pytest.raises(DataLoss, match="before message 17, which was acknowledged") as gone:
            await ids(client, Span(ONE, there.url, 3, 20))
        assert gone.value.acknowledged == 17
        with pytest.raises(DataLoss, match="beyond the last message, 20"):
            await ids(client, Span(ONE, there.url, 30, 40))
        unknown = ONE.replace("1", "9")
        with pytest.raises(DataLoss, match="is not known here"):
            await ids(client, Span(unknown, there.url, 0, 1))
        assert await client.status(there.url, unknown) is NoStatus.UNKNOWN
