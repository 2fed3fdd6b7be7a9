"""`muxkit open`: an interactive session, from a terminal or a script of lines."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import attrs
import click
import trio

import muxkit
from muxkit.cli.common import LinkOptions, client_options, run, session_with, timeout_option
from muxkit.cli.pipe import read_input
from muxkit.cli.terminal import CommandFailed, Exit, printable, say
from muxkit.core import counted
from muxkit.runtime import background

LINE_MOST: Final = 1 << 20  # bytes
SEND_SECONDS: Final = 5.0
HELP: Final = """\
TEXT               send a message on the current channel; open a channel first if there is none
::TEXT             send the message ":TEXT"
:bytes 00 ff       send a message of these bytes
:open [NAME]       open a channel and make it the current one
:use CHANNEL       make another channel the current one, by number or name
:channels          list the channels
:close             finish sending on the current channel
:abort [REASON]    abort the current channel
:stats             show statistics of the session and its channels
:ping              measure a round trip
:hex [on|off]      show messages as bytes
:quit              end the session"""


class _Mistake(Exception):
    """A line that can't be executed. The session continues with the next line."""


@attrs.define(eq=False)
class _Opened:
    """A channel and its label."""

    number: int
    channel: muxkit.Channel
    ours: bool
    finished: bool = False
    """True once this side has finished or aborted the channel."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when no more messages can arrive."""

    @property
    def label(self) -> str:
        return f"{self.number} {self.channel.name}".rstrip()


@click.command("open")
@click.argument("url")
@click.option("--hex", "as_hex", is_flag=True, help="Show messages as hexadecimal bytes; `:hex off` stops that.")
@click.option(
    "--wait",
    type=click.FloatRange(0.0, 1e9),
    default=10.0,
    show_default=True,
    help="Seconds to wait for messages after the end of the input.",
)
@timeout_option
@client_options
def open_(link: LinkOptions, url: str, as_hex: bool, wait: float, timeout: float) -> int:
    """Open a session with the server at URL and send messages interactively, on several channels.

    Each line is a message, and `:help` lists the commands. At the end of the input all channels are closed, and
    messages that still arrive are shown. The input may be a script. The exit code is 1 if a command in it failed.
    """
    code: int = run(partial(_open, url, link, as_hex, wait, within=timeout))
    return code


async def _open(url: str, link: LinkOptions, as_hex: bool, wait: float, *, within: float) -> int:
    is_terminal = sys.stdin.isatty()
    async with session_with(url, link, within=within, linger=1.0) as session:
        shell = _Shell(session, as_hex=as_hex, as_json=link.as_json)
        info = session.info
        fields = {"event": "connected", "protocol": info.protocol, "peer": info.peer}
        help = "; :help lists the commands" if is_terminal else ""
        say(f"connected to {info.peer} by {info.protocol}{help}", fields, as_json=link.as_json)
        mistakes = await shell.run(_lines(), wait)
    if mistakes and not is_terminal:
        raise CommandFailed(f"{counted(mistakes, 'command')} failed")
    return Exit.OK


async def _lines() -> AsyncIterator[str]:
    """Iterate over the lines of standard input."""
    held = b""
    while data := await read_input():
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="surrogateescape")
        if len(held) > LINE_MOST:
            raise CommandFailed(f"a line of the input is longer than {LINE_MOST:,} bytes", Exit.USAGE)
    if held:
        yield held.decode(errors="surrogateescape")


class _Shell:
    """The channels of a session and the commands for them."""

    def __init__(self, session: muxkit.Session, *, as_hex: bool, as_json: bool) -> None:
        self._session = session
        self._as_hex = as_hex
        self._as_json = as_json
        self._opened: dict[int, _Opened] = {}
        self._current: _Opened | None = None
        self._numbers = 0
        self._lost: muxkit.LinkLost | None = None
        self._nursery: trio.Nursery
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "help": self._help,
            "open": self._open,
            "use": self._use,
            "channels": self._channels,
            "bytes": self._bytes,
            "close": self._close,
            "abort": self._abort,
            "stats": self._stats,
            "ping": self._ping,
            "hex": self._hex,
        }

    async def run(self, lines: AsyncIterator[str], wait: float) -> int:
        """Execute each line and return how many failed. Raises `LinkLost` if the session was lost."""
        mistakes = 0
        with trio.CancelScope() as self._scope:
            async with background() as self._nursery:
                self._nursery.start_soon(self._accept)
                async for line in lines:
                    if line.strip() == ":quit":
                        break
                    try:
                        await self._do(line)
                    except _Mistake as error:
                        mistakes += 1
                        click.echo(f"muxkit: {printable(str(error))}", err=True)
                else:
                    with trio.move_on_after(wait):
                        await self._end()
        if self._lost is not None:
            raise self._lost
        return mistakes

    async def _end(self) -> None:
        """Close the channels that were opened here, and wait for messages that still arrive."""
        for each in [*self._opened.values()]:
            if not each.finished:
                await self._finish(each)
        for each in [*self._opened.values()]:
            if each.ours:
                await each.ended.wait()

    async def _do(self, line: str) -> None:
        if line.startswith(":") and not line.startswith("::"):
            name, _, rest = line[1:].strip().partition(" ")
            command = self._commands.get(name)
            if command is None:
                raise _Mistake(f"unknown command :{name}; :help lists them")
            await command(rest.strip())
        else:
            text = line[1:] if line.startswith("::") else line
            await self._send(text.encode(errors="surrogateescape"))

    # ------------------------------------------------------------------------ channels

    async def _accept(self) -> None:
        try:
            async for channel in self._session.incoming():
                self._add(channel, ours=False)
        except muxkit.LinkLost as error:
            self._end_with(error)
            return
        say("the other side closed the session", {"event": "leave"}, as_json=self._as_json)
        for each in [*self._opened.values()]:
            await each.ended.wait()
        self._scope.cancel()

    def _add(self, channel: muxkit.Channel, *, ours: bool) -> _Opened:
        self._numbers += 1
        opened = self._opened[self._numbers] = _Opened(self._numbers, channel, ours)
        self._say(opened, "opened" if ours else "opened by the other side")
        self._nursery.start_soon(self._receive, opened)
        return opened

    async def _receive(self, opened: _Opened) -> None:
        try:
            async for message in opened.channel:
                self._show(opened, message)
            self._say(opened, "ended")
        except muxkit.LinkLost as error:
            self._end_with(error)
        except trio.BrokenResourceError as error:
            opened.finished = True
            self._say(opened, "aborted", str(error))
        except trio.ClosedResourceError:
            pass  # by :abort
        opened.ended.set()
        if opened.finished:
            self._forget(opened)

    def _forget(self, opened: _Opened) -> None:
        self._opened.pop(opened.number, None)
        if self._current is opened:
            self._current = None

    def _end_with(self, error: muxkit.LinkLost) -> None:
        self._lost = self._lost or error
        self._scope.cancel()

    async def _send(self, message: bytes) -> None:
        if self._current is None:
            await self._open("")
        opened = self._used()
        await self._within(partial(opened.channel.send, message), "the channel's window is full; the line was not sent")

    async def _finish(self, opened: _Opened) -> None:
        opened.finished = True
        await self._within(opened.channel.finish, "the peer hasn't confirmed the end of the channel yet")
        if opened.ended.is_set():
            self._forget(opened)

    async def _within(self, work: Callable[[], Awaitable[object]], otherwise: str) -> None:
        """Wait for the other side with a time limit."""
        with trio.move_on_after(SEND_SECONDS) as scope:
            try:
                await work()
            except muxkit.LinkLost as error:
                self._end_with(error)
            except (trio.BrokenResourceError, trio.ClosedResourceError, muxkit.MuxError) as error:
                raise _Mistake(str(error)) from error
        if scope.cancelled_caught:
            raise _Mistake(f"the other side: {otherwise}")

    def _used(self) -> _Opened:
        if self._current is None:
            raise _Mistake("no channel in use: use :open or :use")
        return self._current

    # ------------------------------------------------------------------------ commands

    async def _help(self, rest: str) -> None:
        for line in HELP.splitlines():
            click.echo(line)

    async def _open(self, name: str) -> None:
        async def work() -> None:
            self._current = self._add(await self._session.open(name), ours=True)

        await self._within(work, "the peer accepts no more channels now")

    async def _use(self, which: str) -> None:
        found = [each for each in self._opened.values() if which in (str(each.number), each.channel.name)]
        if not which or not found:
            raise _Mistake(f"unknown channel {which!r}; :channels lists them")
        if found[0].finished:
            raise _Mistake(f"channel {found[0].label} is closed")
        self._current = found[0]

    async def _channels(self, rest: str) -> None:
        for each in self._opened.values():
            state = [word for word, holds in (("closed", each.finished), ("ended", each.ended.is_set())) if holds]
            self._say(each, "in use" if each is self._current else "open", " and ".join(state))

    async def _bytes(self, rest: str) -> None:
        try:
            message = bytes.fromhex(rest)
        except ValueError:
            raise _Mistake(f"invalid bytes {rest!r}: expected hexadecimal bytes, such as 00 ff") from None
        await self._send(message)

    async def _close(self, rest: str) -> None:
        opened = self._used()
        self._current = None
        await self._finish(opened)

    async def _abort(self, reason: str) -> None:
        opened = self._used()
        opened.finished = True
        opened.channel.abort(reason)
        self._say(opened, "given up")
        self._forget(opened)

    async def _stats(self, rest: str) -> None:
        stats = attrs.asdict(self._session.stats())
        channels = {each.label: attrs.asdict(each.channel.stats()) for each in self._opened.values()}
        if self._as_json:
            say("", {"event": "stats", "session": stats, "channels": channels}, as_json=True)
            return
        for label, values in {
            "session": stats,
            **{f"channel {label}": each for label, each in channels.items()},
        }.items():
            told = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in values.items())
            click.echo(printable(f"{label}: {told}"))

    async def _ping(self, rest: str) -> None:
        async def work() -> None:
            seconds = await self._session.ping()
            say(f"{seconds * 1000:.1f} ms", {"event": "ping", "seconds": seconds}, as_json=self._as_json)

        await self._within(work, "no answer")

    async def _hex(self, rest: str) -> None:
        if rest not in ("", "on", "off"):
            raise _Mistake("expected :hex on or :hex off")
        self._as_hex = not self._as_hex if not rest else rest == "on"

    # ------------------------------------------------------------------------ output

    def _say(self, opened: _Opened, what: str, more: str = "") -> None:
        fields = {"event": what.replace(" ", "_"), "channel": opened.number, "name": opened.channel.name, "text": more}
        say(f"{opened.label}: {what}{f': {more}' if more else ''}", fields, as_json=self._as_json)

    def _show(self, opened: _Opened, message: bytes) -> None:
        text = message.decode(errors="backslashreplace")
        fields: dict[str, Any] = {"event": "message", "channel": opened.number, "name": opened.channel.name}
        fields |= {"hex": message.hex()} if self._as_hex else {"text": text}
        say(f"{opened.label}< {message.hex(' ') if self._as_hex else text}", fields, as_json=self._as_json)


def _figure(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
