"""The jobs bulk, small, receive_many, send_many, flat and among: throughput in one direction, verified."""

from __future__ import annotations

import zlib
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from .meter import Cost, Meter, fit
from .orders import MESSAGE, Order, Way, Wrong, pack_order, unpack_receipt
from .payloads import payloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .conversations import Conversation
    from .peers import Connection
    from .tasks import Measured, Task

MIB = 1024 * 1024
FIRST_BYTES = 2 * MIB  # of bulk, and
FIRST_MESSAGES = 2000  # small ones: what the first trial sends, on all channels together
SENDERS = 100  # tasks of the job flat
VISIT = 64  # messages that each sends on a channel before it goes to the next


async def stream(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Send messages on all channels at once; the time ends with the last receipt."""
    opened = [await connection.open() for _ in range(task["channels"])]
    measured = await _stream_on(opened, meter, task)
    await _close(connection, opened)
    return measured


async def flat(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Send on many channels with a fixed number of tasks; each visits its channels in turn."""
    opened = [await connection.open() for _ in range(task["channels"])]
    senders = min(SENDERS, len(opened))
    turns = [cycle(opened[number::senders]) for number in range(senders)]

    async def run(count: int, verify: bool) -> Cost:
        order = Order(Way.MANY, VISIT, task["size"], verify)

        async def visit(turn: cycle[Conversation]) -> None:
            for _ in range(count):
                await _send(next(turn), order, 1)

        return await meter.together([partial(visit, turn) for turn in turns])

    count = await fit(task, 1, run)
    cost = await run(count, False)
    await _close(connection, opened)
    return cost.of(count, count * senders * VISIT)


async def among(connection: Connection, meter: Meter, task: Task) -> Measured:
    """Send on one channel, opened after many others, which had one echo each and are idle since."""
    others = [await connection.open() for _ in range(task["channels"])]
    await _echo_on_each(others)
    conversation = await connection.open()
    measured = await _stream_on([conversation], meter, task)
    await _close(connection, [*others, conversation])
    return measured


async def _stream_on(opened: Sequence[Conversation], meter: Meter, task: Task) -> Measured:
    size, is_bulk = task["size"], task["size"] > MESSAGE
    way = Way.BULK if is_bulk else Way.EACH if task["each"] else Way.MANY

    async def run(count: int, verify: bool) -> Cost:
        order = Order(way, count, size, verify)
        return await meter.together([partial(_send, conversation, order, task["batch"]) for conversation in opened])

    count = await fit(task, max(1, (FIRST_BYTES // size if is_bulk else FIRST_MESSAGES) // len(opened)), run)
    cost = await run(count, False)
    messages = count * len(opened)
    return cost.of(count, messages * size / MIB if is_bulk else messages)


async def _echo_on_each(opened: Sequence[Conversation]) -> None:
    """Send all messages, then read all answers: ten thousand round trips would take longer than the pass."""
    messages = payloads(MESSAGE)
    for number, conversation in enumerate(opened):
        await conversation.send(messages[number % len(messages)])
    for number, conversation in enumerate(opened):
        if await conversation.receive() != messages[number % len(messages)]:
            raise Wrong(f"the echo on channel {number} of {len(opened)} is not what was sent")


async def _close(connection: Connection, opened: Sequence[Conversation]) -> None:
    for conversation in reversed(opened):
        await connection.close(conversation)


async def _send(conversation: Conversation, order: Order, batch: int) -> None:
    """Send what an order says, and check the receipt."""
    messages = payloads(order.size)
    prepared = [conversation.prepare(message, order.way) for message in messages]
    send, count = conversation.send, order.messages
    await send(pack_order(order))
    if batch > 1:
        whole = prepared * (batch // len(prepared)) if len(prepared) <= batch else prepared[:batch]
        for _ in range(count // len(whole)):
            await conversation.send_batch(whole)
        if count % len(whole):
            await conversation.send_batch(whole[: count % len(whole)])
    elif order.verify:
        for number in range(count):
            await send(prepared[number % len(prepared)])
    else:
        message = prepared[0]
        for _ in range(count):
            await send(message)
    check(await conversation.receive(), order)


def check(receipt: bytes, order: Order) -> None:
    """Check a receipt; raises `Wrong` with both numbers."""
    found = unpack_receipt(receipt)
    sent = (order.messages, order.messages * order.size)
    if found[:2] != sent:
        raise Wrong("{} messages of {} bytes were sent, {} of {} bytes came".format(*sent, *found[:2]))
    if order.verify:
        messages, crc = payloads(order.size), 0
        for number in range(order.messages):
            crc = zlib.crc32(messages[number % len(messages)], crc)
        if crc != found.crc:
            raise Wrong(
                f"of {order.messages} messages of {order.size} bytes the CRC-32 is {found.crc:08x}, not {crc:08x}"
            )
