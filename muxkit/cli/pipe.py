"""`muxkit pipe`: standard input and output on one channel of a server."""

from __future__ import annotations

import os
import sys
from functools import partial

import click
import trio

import muxkit
from muxkit.cli.common import LinkOptions, client_options, run, session_with, timeout_option
from muxkit.cli.processes import CODE, ERRORS, Conversation
from muxkit.cli.terminal import CommandFailed, Exit
from muxkit.runtime import background

READ_SIZE = 65_536
PIECE = 32_768


async def read_input() -> bytes:
    """Read from standard input of any kind. Returns an empty result at its end."""
    return await trio.to_thread.run_sync(os.read, sys.stdin.fileno(), READ_SIZE, abandon_on_cancel=True)


async def write_to(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor of this process, which may block."""
    await trio.to_thread.run_sync(_write, descriptor, data, abandon_on_cancel=True)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@click.command()
@click.argument("url")
@click.option("--name", default="", help="The name of the channel, for servers that have several.")
@timeout_option
@client_options
def pipe(link: LinkOptions, url: str, name: str, timeout: float) -> int:
    """Connect standard input and output to a channel of the server at URL.

    The end of the input is sent to the server, whose output continues. The command ends when both have ended. If the
    server is `muxkit serve --exec`, the remote command's error output is written to standard error, and its exit code
    becomes that of this command.
    """
    code: int = run(partial(_pipe, url, link, name, timeout))
    return code


async def _pipe(url: str, link: LinkOptions, name: str, within: float) -> int:
    async with session_with(url, link, within=within) as session:
        conversation = Conversation()
        channel = await session.open(name, payload=conversation.opening)
        try:
            code = await _carry(channel, conversation)
        except (muxkit.ChannelCancelled, muxkit.ChannelStopped) as error:
            raise CommandFailed(error.reason or str(error)) from error
        await channel.aclose()
    return code


async def _carry(channel: muxkit.Channel, conversation: Conversation) -> int:
    stopped: list[trio.BrokenResourceError] = []
    sent = trio.Event()

    async def send_input() -> None:
        try:
            while data := await read_input():
                for start in range(0, len(data), PIECE):
                    await channel.send(data[start : start + PIECE])
            await channel.finish()
        except trio.BrokenResourceError as error:  # the receiving side learns of it too; `head` has enough, and speaks
            stopped.append(error)
        sent.set()

    async with background() as nursery:
        nursery.start_soon(send_input)
        async for message in channel:
            kind, data = conversation.receive(message)
            if kind == CODE:
                return int(data) if data.isdigit() else Exit.FAILED
            await write_to(sys.stderr.fileno() if kind == ERRORS else sys.stdout.fileno(), data)
        if conversation.is_framed:
            raise CommandFailed("the other side ended without sending an exit code")
        await sent.wait()
    if stopped and getattr(stopped[0], "reason", None):
        raise stopped[0]
    return Exit.OK
