"""Commands on channels: one process per channel, with its input, output, errors and exit code.

A client that wants errors and exit code opens its channel with the payload `muxkit.exec 1 NONCE`. A server that runs
commands answers with the message `muxkit.exec ok NONCE`. From then on, each of its messages begins with a byte for its
kind: `1` output, `2` errors, and `x` the exit code in digits, which is the last message. No other server sends that
nonce, so the client recognizes such a server by its first message.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import attrs
import trio

import muxkit
from muxkit.cli.common import plain_environment
from muxkit.cli.terminal import printable
from muxkit.runtime import bare_nursery

PIECE: Final = 32_768  # bytes of output in one message
KILL_SECONDS: Final = 5.0  # between SIGTERM and SIGKILL
BUSY: Final = 503  # the code of a channel that is refused because too many commands run
NOT_STARTED: Final = 126  # the exit code of a command that could not be started, as of a shell

_ASKED: Final = b"muxkit.exec 1 "
_GRANTED: Final = b"muxkit.exec ok "
OUTPUT, ERRORS, CODE = b"1", b"2", b"x"


# ---------------------------------------------------------------------------- the client


@attrs.define
class Conversation:
    """Distinguishes output, errors and exit code in the messages of one pipe."""

    nonce: bytes = attrs.field(factory=lambda: secrets.token_hex(16).encode())
    is_framed: bool | None = None
    """Whether the messages say what they are; None before the first one."""

    @property
    def opening(self) -> bytes:
        """The payload to open the channel with."""
        return _ASKED + self.nonce

    def receive(self, message: bytes) -> tuple[bytes, bytes]:
        """Return the kind of a message (`OUTPUT`, `ERRORS` or `CODE`) and its bytes."""
        if self.is_framed is None:
            self.is_framed = message == _GRANTED + self.nonce
            if self.is_framed:
                return OUTPUT, b""
        return (message[:1], message[1:]) if self.is_framed else (OUTPUT, message)


# ---------------------------------------------------------------------------- the server


def run_commands(arguments: Sequence[str], *, at_once: int) -> Callable[[muxkit.Channel], Awaitable[None]]:
    """Return a channel handler that runs a command for each channel, at most `at_once` at the same time."""
    running = 0

    async def handle(channel: muxkit.Channel) -> None:
        nonlocal running
        if running >= at_once:
            channel.abort(f"{at_once} commands are running already", code=BUSY)
            return
        running += 1
        try:
            await _run(channel, arguments)
        finally:
            running -= 1

    return handle


async def _run(channel: muxkit.Channel, arguments: Sequence[str]) -> None:
    nonce = channel.opening.removeprefix(_ASKED) if channel.opening.startswith(_ASKED) else None
    if nonce is not None:
        await channel.send(_GRANTED + nonce)
    try:
        async with _process(channel, arguments, with_errors=nonce is not None) as process:
            code = await _carry(channel, process, framed=nonce is not None)
    except OSError as error:
        print(printable(f"muxkit: {arguments[0]}: {error.strerror or error}"), file=sys.stderr)
        if nonce is None:
            channel.abort("failed to start the command", code=NOT_STARTED)
            return
        await channel.send(ERRORS + b"muxkit: failed to start the command\n")
        code = NOT_STARTED
    if nonce is not None:
        await channel.send(CODE + str(code).encode())
    await channel.finish()


@asynccontextmanager
async def _process(
    channel: muxkit.Channel, arguments: Sequence[str], *, with_errors: bool
) -> AsyncIterator[trio.Process]:
    """Start the command. It is terminated with everything it started if it still runs at the end of the block."""
    identity = channel.session.info.identity
    told = {"MUXKIT_CHANNEL": channel.name, "MUXKIT_PEER": channel.session.info.peer}
    if identity is not None and identity.user:
        told["MUXKIT_USER"] = identity.user
    process = await trio.lowlevel.open_process(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if with_errors else None,
        env=plain_environment() | {name: printable(value) for name, value in told.items()},
        start_new_session=True,  # or the Ctrl-C that drains the server would end its commands
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with trio.CancelScope(shield=True):
                with trio.move_on_after(KILL_SECONDS):
                    await process.wait()
                if process.poll() is None:
                    _signal(process, signal.SIGKILL)
                    await process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                await trio.aclose_forcefully(stream)


def _signal(process: trio.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _carry(channel: muxkit.Channel, process: trio.Process, *, framed: bool) -> int:
    """Copy data in both directions until the command and its output have ended. Return the exit code."""

    async def output(stream: trio.abc.ReceiveStream, kind: bytes) -> None:
        prefix = kind if framed else b""
        async for data in stream:
            for start in range(0, len(data), PIECE):
                await channel.send(prefix + bytes(data[start : start + PIECE]))

    assert process.stdout is not None
    async with bare_nursery() as nursery:
        nursery.start_soon(_feed, channel, process)
        async with bare_nursery() as outputs:
            outputs.start_soon(output, process.stdout, OUTPUT)
            if process.stderr is not None:
                outputs.start_soon(output, process.stderr, ERRORS)
            await process.wait()
        nursery.cancel_scope.cancel()
    code = process.returncode
    assert code is not None
    return code if code >= 0 else 128 - code


async def _feed(channel: muxkit.Channel, process: trio.Process) -> None:
    assert process.stdin is not None
    reads = True
    async for message in channel:
        if reads:
            try:
                await process.stdin.send_all(message)
            except trio.BrokenResourceError:  # the command reads no more; what still comes must not stall the channel
                reads = False
    await process.stdin.aclose()
