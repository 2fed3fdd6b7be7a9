"""Channels attached to messages are used, closed or lost, and leave nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from muxkit import LocalProtocolError
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Finished, LostInTransit, Mode, NoReceiver, Receiver, Sender
from tests.protocols.aqueduct._session_pairs import (
    at_rest,
    canary,
    carried_receiver,
    carried_sender,
    connected,
    leftovers,
    over_a_plain_link,
    payloads,
    rough,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock


# --- attached channels


async def test_a_half_of_either_kind_can_be_sent_in_either_direction(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair)
        out, into = await carried_receiver(pair)
        for side, sender, receiver in ((pair.server, back, forth), (pair.client, out, into)):
            kept_receiver, for_sender = side.channel()
            kept_sender, for_receiver = side.channel("sender")
            await sender.send(b"both", attachments=[for_sender, for_receiver])
            message = await receiver.receive()
            async with message:
                far_sender, far_receiver = message.sender(0), message.receiver(1)
            await far_sender.send(b"there")
            await kept_sender.send(b"and back")
            assert (await kept_receiver.receive()).payload == b"there"
            assert (await far_receiver.receive()).payload == b"and back"
            await far_sender.finish()
            await kept_sender.finish()
        await canary(pair)


async def test_a_channel_can_be_carried_by_a_channel_that_was_carried(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        for _ in range(5):
            deeper, ticket = pair.client.channel("sender")
            await sender.send(b"", attachments=[ticket])
            receiver = (await receiver.receive()).receiver()
            sender = deeper
        await sender.send(b"from the deep")
        assert (await receiver.receive()).payload == b"from the deep"


async def test_channel_headers_travel_with_the_half(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair, headers=[(b"kind", b"prices")])
        assert back.headers == forth.headers == ((b"kind", b"prices"),)


@pytest.mark.clause("aqueduct-E26")
async def test_a_oneshot_channel_carries_one_message_and_ends_by_itself(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, forth = await carried_sender(pair, oneshot=True)
        await back.send(b"the answer")
        with pytest.raises(trio.ClosedResourceError):
            await back.send(b"another")
        await back.finish()
        assert await payloads(forth) == [b"the answer"]


async def test_messages_that_overtake_the_one_that_carries_their_receiver_wait_for_it(
    autojump_clock: MockClock,
) -> None:
    async with connected() as pair:
        sender, ticket = pair.client.channel("sender")
        entrypoint = pair.client.entrypoint
        await entrypoint.send(bytes(200_000), attachments=[ticket])  # takes several turns of the link
        for mode in Mode:
            await sender.send(b"early", mode=mode)
        sender.close()
        receiver = (await pair.server.entrypoint.receive()).receiver()
        assert await payloads(receiver) == [b"early"] * 3


async def test_a_channel_that_comes_with_its_messages_and_its_end_at_once_brings_them_all(
    autojump_clock: MockClock,
) -> None:
    async with connected(over_a_plain_link) as pair:
        await pair.client.peer_headers()
        sender, ticket = pair.client.channel("sender")
        await pair.client.entrypoint.send(b"", attachments=[ticket])
        await sender.send(b"x")
        sender.close()
        receiver = (await pair.server.entrypoint.receive()).receiver()
        assert await payloads(receiver) == [b"x"]


@pytest.mark.parametrize("mode", [Mode.UNORDERED, Mode.UNRELIABLE])
async def test_channels_can_be_attached_to_messages_of_every_mode(mode: Mode, autojump_clock: MockClock) -> None:
    async with connected() as pair:
        receiver, ticket = pair.client.channel()
        await pair.client.entrypoint.send(b"", attachments=[ticket], mode=mode)
        sender = (await pair.server.entrypoint.receive()).sender()
        await sender.send(b"x")
        await sender.finish()
        assert await payloads(receiver) == [b"x"]


async def test_halves_that_are_not_taken_are_closed_with_the_block_of_their_message(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        receiver, for_sender = pair.client.channel()
        sender, for_receiver = pair.client.channel("sender")
        kept, for_taken = pair.client.channel()
        await pair.client.entrypoint.send(b"", attachments=[for_sender, for_receiver, for_taken])
        async with await pair.server.entrypoint.receive() as message:
            taken = message.sender(2)
        with pytest.raises(Finished):
            await receiver.receive()
        await trio.testing.wait_all_tasks_blocked()  # each half has its own error for it
        with pytest.raises(NoReceiver):
            await sender.finish()
        await taken.send(b"alive")
        assert (await kept.receive()).payload == b"alive"


async def test_halves_that_were_not_taken_are_aborted_when_the_block_fails(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        receiver, ticket = pair.client.channel()
        await pair.client.entrypoint.send(b"", attachments=[ticket])
        with pytest.raises(KeyError):
            async with await pair.server.entrypoint.receive():
                raise KeyError
        with pytest.raises(aqueduct.Cancelled):
            await receiver.receive()


async def test_a_closed_receiver_closes_the_halves_in_its_unread_messages(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, receiver = await carried_receiver(pair)
        kept, ticket = pair.client.channel()
        await sender.send(b"", attachments=[ticket])
        await at_rest()
        assert receiver.unread == 1
        receiver.close()
        with pytest.raises((Finished, LostInTransit)):
            await kept.receive()
        await at_rest(2)
        assert leftovers(pair) == []


async def test_an_attachment_is_taken_once_and_as_what_it_is(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        _receiver, ticket = pair.client.channel()
        await pair.client.entrypoint.send(b"", attachments=[ticket])
        message = await pair.server.entrypoint.receive()
        assert repr(message) == "<aqueduct.Message 0, 0 bytes, 1 attached>"
        wrongs: tuple[tuple[Callable[[], object], str], ...] = (
            (lambda: message.receiver(), "attachment 0 is a Sender, not a Receiver"),
            (lambda: message.sender(1), "attachment 1 of a message that has 1"),
            (lambda: message.take(-1), "attachment -1 of a message that has 1"),
        )
        for wrong, text in wrongs:
            with pytest.raises(LocalProtocolError, match=text):
                wrong()
        message.sender().close()
        with pytest.raises(LocalProtocolError, match="was taken before"):
            message.take()


async def test_a_ticket_is_spent_with_the_message_that_carries_it(autojump_clock: MockClock) -> None:
    async with connected() as pair, rough() as other:
        entrypoint = pair.client.entrypoint
        receiver, ticket = pair.client.channel()
        with pytest.raises(LocalProtocolError, match="can be sent once"):
            await entrypoint.send(b"", attachments=[ticket, ticket])
        with pytest.raises(LocalProtocolError, match="on the connection that it was made for"):
            await other.client.entrypoint.send(b"", attachments=[ticket])
        with pytest.raises(LocalProtocolError, match="only the ticket of a new channel"):
            await entrypoint.send(b"", attachments=[receiver])  # type: ignore[list-item]
        with trio.CancelScope() as scope:
            scope.cancel()
            await entrypoint.send(b"", attachments=[ticket])
        assert not ticket.spent
        await entrypoint.send(b"", attachments=[ticket])
        with pytest.raises(LocalProtocolError, match="can be sent once"):
            await entrypoint.send(b"", attachments=[ticket])
        (await pair.server.entrypoint.receive()).close()


async def test_a_half_can_be_used_once_the_other_one_is_on_its_way(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        sender, ticket = pair.client.channel("sender")
        assert "not sent yet" in repr(sender)
        for mode in Mode:
            with pytest.raises(LocalProtocolError, match="has not been sent yet"):
                await sender.send(b"x", mode=mode)
        with pytest.raises(LocalProtocolError, match="has not been sent yet"):
            await sender.send_many([b"x"])
        await pair.client.entrypoint.send(b"", attachments=[ticket])
        await sender.send(b"y")
        receiver = (await pair.server.entrypoint.receive()).receiver()
        await sender.finish()
        assert await payloads(receiver) == [b"y"]


async def test_a_receiver_can_be_waited_for_before_its_sender_was_sent(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        receiver, ticket = pair.client.channel()
        got: list[bytes] = []

        async def wait() -> None:
            got.extend(await payloads(receiver))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await at_rest()
            await pair.client.entrypoint.send(b"", attachments=[ticket])
            async with (await pair.server.entrypoint.receive()).sender() as sender:
                await sender.send(b"at last")
        assert got == [b"at last"]


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_ticket_of_a_half_that_was_closed_before_is_worth_nothing(
    how: str, autojump_clock: MockClock
) -> None:
    async with connected() as pair:
        for keep in ("sender", "receiver"):
            half: Sender | Receiver
            half, ticket = pair.client.channel(keep)
            {"close": half.close, "abort": half.abort}[how]()
            with pytest.raises(LocalProtocolError, match="can be sent once"):
                await pair.client.entrypoint.send(b"", attachments=[ticket])
            with pytest.raises(trio.ClosedResourceError):
                await (half.send(b"") if isinstance(half, Sender) else half.receive())
            if isinstance(half, Sender) and how == "close":
                await half.finish()
