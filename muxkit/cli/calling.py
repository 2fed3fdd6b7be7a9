"""`muxkit call` and `muxkit describe`: typed calls from the command line, with JSON in and out."""

from __future__ import annotations

import sys
from functools import partial

import click
import msgspec
import trio

import muxkit
from muxkit.cli.common import LinkOptions, client_options, run, session_with, timeout_option
from muxkit.cli.terminal import CommandFailed, Exit, printable
from muxkit.cli.typescript import declarations
from muxkit.rpc import Description, Reflection
from muxkit.rpc import client as rpc_client
from muxkit.rpc.services import END, ITEM, PREFIX, TIMEOUT_HEADER, ErrorRecord, timeout_text
from muxkit.runtime import background

_errors = msgspec.json.Decoder(ErrorRecord)


@click.command()
@click.argument("url")
@click.argument("method")
@click.argument("arguments", default="{}")
@click.option("--stream", "streams", is_flag=True, help="Send each line of standard input as an item of the stream.")
@click.option("--deadline", type=float, help="Seconds until the call is cancelled, on the server too.")
@timeout_option
@client_options
def call(
    link: LinkOptions, url: str, method: str, arguments: str, streams: bool, deadline: float | None, timeout: float
) -> int:
    """Call METHOD of the server at URL and print its result as JSON. ARGUMENTS is a JSON object.

    For example: muxkit call bpmux+tcp://127.0.0.1:7000 Orders.get '{"id": 7}'. A method that returns a stream prints
    one item per line.
    """
    try:
        msgspec.json.decode(arguments, type=dict)
    except msgspec.MsgspecError as error:
        raise CommandFailed(f"invalid arguments: expected a JSON object: {error}", Exit.USAGE) from error
    code: int = run(partial(_call, url, link, method, arguments.encode(), streams, deadline, timeout))
    return code


async def _call(
    url: str, link: LinkOptions, method: str, arguments: bytes, streams: bool, deadline: float | None, within: float
) -> int:
    async with session_with(url, link, within=within) as session:
        with trio.CancelScope() as scope:
            if deadline is not None:
                scope.relative_deadline = deadline
            headers = {"codec": "json"}
            if (left := timeout_text()) is not None:
                headers[TIMEOUT_HEADER] = left
            if not streams and await _takes_stream(session, method):
                text = f"{method} takes a stream: pass --stream, and one item per line of standard input"
                raise CommandFailed(text, Exit.USAGE)
            channel = await session.open(f"{PREFIX}{method}", payload=arguments, headers=headers)
            try:
                await _carry(channel, streams)
            except (muxkit.ChannelCancelled, muxkit.ChannelStopped) as error:
                raise CommandFailed(error.reason or str(error)) from error
            await channel.aclose()
        if scope.cancelled_caught:
            raise CommandFailed(f"{method}: no result within {deadline:g} s", Exit.TIMED_OUT)
    return Exit.OK


async def _takes_stream(session: muxkit.Session, method: str) -> bool:
    """Return True if the server says that callers of this method send a stream. The call would wait for its end."""
    try:
        description = await rpc_client(Reflection, session).describe()
    except muxkit.rpc.Error:  # a server without reflection
        return False
    return any(each.takes_stream for each in description.methods if each.name == method)


async def _carry(channel: muxkit.Channel, streams: bool) -> None:
    async with background() as nursery:
        if streams:
            nursery.start_soon(_send_lines, channel)
        async for message in channel:
            if message[:1] == END:
                return
            if message[:1] != ITEM:
                error = _errors.decode(message[1:])
                details = "" if error.details is None else f" {msgspec.json.encode(error.details).decode()}"
                raise CommandFailed(f"{error.type or error.code}: {error.message}{details}")
            click.echo(printable(message[1:].decode(errors="backslashreplace")))


async def _send_lines(channel: muxkit.Channel) -> None:
    try:
        while line := await trio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
            if line.strip():
                await channel.send(ITEM + line.strip())
        await channel.send(END)
    except muxkit.ChannelStopped:
        pass  # the server needs no more; its answer says why


@click.command()
@click.argument("url")
@click.option("--schemas", is_flag=True, help="Print JSON, with the schemas of all types.")
@click.option("--typescript", is_flag=True, help="Print TypeScript declarations for the client in muxkit.js.")
@timeout_option
@client_options
def describe(link: LinkOptions, url: str, schemas: bool, typescript: bool, timeout: float) -> int:
    """List the methods of the server at URL, with their Python signatures."""
    if schemas and typescript:
        raise click.UsageError("--schemas and --typescript can't be used together")
    code: int = run(partial(_describe, url, link, schemas, typescript, timeout))
    return code


async def _describe(url: str, link: LinkOptions, schemas: bool, typescript: bool, within: float) -> int:
    async with session_with(url, link, within=within) as session:
        try:
            description = await rpc_client(Reflection, session).describe()
        except muxkit.rpc.Error as error:
            raise CommandFailed(f"the server doesn't describe its methods: {error.message}") from error
    if schemas:
        click.echo(msgspec.json.format(msgspec.json.encode(description)).decode())
    elif typescript:
        click.echo(declarations(description), nl=False)
    else:
        _show(description)
    return Exit.OK


def _show(description: Description) -> None:
    for method in sorted(description.methods, key=lambda each: each.name):
        click.echo(printable(method.signature))
        for line in method.doc.splitlines()[:1]:
            click.echo(f"    {printable(line)}")
