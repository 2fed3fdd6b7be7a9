"""Requests to restream servers: status, a range of messages, a count, and an acknowledgement.

This module doesn't need Spark. Every request uses its own connection. Reading neither takes over a session nor deletes
messages. Only `acknowledge` lets a server delete messages: for the named reader of the options, or as the only client
if there is none.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final

import attrs
import trio

from muxkit import PluginError, RemoteProtocolError
from muxkit.core import without_secrets
from muxkit.pipeline.errors import DataLoss, OptionError, PipelineError, StreamBroken, StreamUnavailable
from muxkit.pipeline.options import SourceOptions, Tls, Verify, link_options
from muxkit.pipeline.source.offsets import Span
from muxkit.protocols import restream
from muxkit.protocols.restream import ClientEngine, ClientEvent, ErrorCode, Json
from muxkit.protocols.restream.client import ClientDriver, Closing, Stop, dial_of
from muxkit.protocols.restream.engine import BlockEngine, ReceivedBlock
from muxkit.protocols.restream.wire import Block, StoredMessage
from muxkit.protocols.restream.wire.json import parse_json
from muxkit.runtime import Dial, Ended

Take = Callable[[Block], Awaitable[None]]

READ_SIZE: Final = 256 * 1024  # bytes to read per call
SILENCE_TIMEOUT: Final = 20.0  # s without a byte after which a connection is replaced
CLOSE_TIMEOUT: Final = 5.0  # s that a server may take to close the connection after an acknowledgement
TOO_LONG: Final = "restream-F12"
TOGETHER: Final = 500  # streams per status request
STATUSES_LINE: Final = 4 << 20  # bytes of the answer to such a request
LATER: Final = (ErrorCode.BUSY, ErrorCode.UNAVAILABLE, ErrorCode.FAILED)  # worth a retry within the option's time
LOST: Final = (ErrorCode.GONE, ErrorCode.BEYOND, ErrorCode.UNKNOWN)
NO_CONNECTION: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)

_log = logging.getLogger("muxkit")


class NoStatus(Enum):
    """The reasons why a server gave no status of a stream."""

    UNKNOWN = "it knows no such session"
    PLAIN = "it answers no status requests"
    AWAY = "it does not answer"


Answer = restream.Status | NoStatus


class Client:
    """A client of the servers in the options. It has no state, so each process can make its own."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    async def status(self, server: str, uuid: str, *, within: float | None = None) -> Answer:
        """Ask a server for the status of a stream, within `within` seconds or those of the option `statusTimeout`.

        Raises:
            StreamUnavailable: if the server doesn't answer in time.
        """
        request = _Status(uuid, self._options)
        request.timeout = within or request.timeout
        await request.run(self._dial(server))
        assert request.answer is not None
        return request.answer

    async def statuses(
        self, server: str, uuids: Sequence[str], *, done: Mapping[str, int] | None = None, within: float | None = None
    ) -> dict[str, Answer] | None:
        """Ask a server for the status of several streams with one request.

        Args:
            server: the URL of the server.
            uuids: the streams, at most `TOGETHER`.
            done: the last message that the reader is done with, by stream, to report with the request.
            within: seconds to wait. By default those of the option `statusTimeout`.

        Returns:
            The answers by stream, or None if the server answers only for one stream at a time.

        Raises:
            StreamUnavailable: if the server doesn't answer in time.
        """
        request = _Statuses(uuids, done, self._options)
        request.timeout = within or request.timeout
        await request.run(self._dial(server))
        return request.answers

    async def listing(self, server: str, since: str, *, within: float | None = None) -> restream.Listing:
        """Ask a server for the sessions that have changed since the `next` of an earlier listing, or for all of them.

        Raises:
            OptionError: if the server has no listing.
            StreamUnavailable: if the server doesn't answer in time.
        """
        request = _Listing(server, since, self._options)
        request.timeout = within or request.timeout
        await request.run(self._dial(server))
        assert request.listing is not None
        return request.listing

    async def fetch(self, span: Span, take: Take) -> None:
        """Await `take` with all messages of a range, in order and each once.

        The data of a message is the JSON that the server sent, or an encoded record. Nothing is acknowledged.

        Raises:
            DataLoss: if the server has deleted some of the messages.
            StreamBroken: if the server breaks its protocol.
            StreamUnavailable: if the messages can't be read in time.
        """
        if span.count:
            await _Range(span, take, self._options).run(self._dial(span.server))

    async def find(self, span: Span, moment: float) -> int:
        """Return the id of the message before the first one in a range whose time isn't before `moment`.

        Returns the end of the range if there is no such message. The search assumes that times ascend. A message
        without a time counts as earlier.

        Raises:
            OptionError: if none of the messages that were read has a time.
        """
        low, high = span.begin, span.end
        found: list[float | None] = []
        is_timed: list[bool] = []

        async def take(block: Block) -> None:
            await trio.lowlevel.checkpoint()
            found.extend(block.times)

        while low < high:
            middle = (low + high) // 2
            await self.fetch(attrs.evolve(span, begin=middle, end=middle + 1), take)
            time = found[-1] if found else None  # without a message, it was lost and the options allow that
            is_timed += [each is not None for each in found]
            found.clear()
            if time is not None and time >= moment:
                high = middle
            else:
                low = middle + 1
        if is_timed and not any(is_timed):
            raise OptionError(
                "startingTimestamp",
                f"stream {span.uuid}: expected messages with a time, and got none in those that were read, up to "
                f"message {span.end}; append with time=…, or begin by startingOffsets",
            )
        return low

    async def count(self, server: str, uuid: str, begin: int, *, most: int, most_bytes: int | None = None) -> int:
        """Count by reading: return the id of the last message that exists now.

        Stops after `most` messages, or after the message with which they exceed `most_bytes`.

        Raises:
            DataLoss: if the server has deleted messages after `begin`.
            StreamBroken: if the server breaks its protocol.
            StreamUnavailable: if the messages can't be read in time.
        """
        request = _Count(uuid, begin, most, most_bytes, self._options)
        await request.run(self._dial(server))
        return request.last

    async def acknowledge(self, server: str, uuid: str, id: int) -> None:
        """Allow the server to delete everything up to this message. Repeating an acknowledgement is harmless."""
        await _Acknowledge(uuid, id, self._options).run(self._dial(server))

    def _dial(self, server: str) -> Dial:
        tls = self._options.tls
        return _dial(server, tls, tuple(map(_written, (tls.ca_file, tls.cert_file, tls.key_file))))


@lru_cache(maxsize=1024)
def _dial(server: str, tls: Tls, written: tuple[float, ...]) -> Dial:
    """Return the dial for a server. The result is cached, because finding a transport takes longer than a small read.

    `written` are the modification times of the TLS files. When a certificate is renewed, the cached entry is no longer
    used.
    """
    try:
        return dial_of(server, link_options(server, tls))
    except (PluginError, ValueError, TypeError) as error:
        raise (
            error if isinstance(error, OptionError) else OptionError("servers", f"{without_secrets(server)}: {error}")
        ) from error


def _written(path: str | None) -> float:
    try:
        return 0.0 if path is None else Path(path).stat().st_mtime
    except OSError:
        return 0.0


def blocks_of(events: Sequence[ClientEvent]) -> list[Block]:
    """Return the messages in these events, in the groups in which they arrived."""
    return [event.block for event in events if isinstance(event, ReceivedBlock)]


def decoded(stream: str, message: StoredMessage) -> Json:
    """Return the data of a message. Raises `StreamBroken` if it isn't strict JSON."""
    try:
        return parse_json(message.data)
    except RemoteProtocolError as error:
        raise StreamBroken(stream, f"the server broke a rule: {error}") from error


# ---------------------------------------------------------------------------- requests


class _Refused(ConnectionError):
    """The server refused, so this attempt has failed."""


class _Request(ABC):
    """A request, repeated on new connections until it is complete or its time is up.

    It acts as the task of restream's client driver, and limits the time without progress.
    """

    option = "statusTimeout"  # the option that limits the time without progress
    silence = SILENCE_TIMEOUT  # s without a byte after which a connection is dropped
    complete_after: tuple[Stop, ...] = ()  # the ends of a connection that complete the request
    closing = Closing.AT_ONCE

    def __init__(self, stream: str, timeout: float) -> None:
        self.stream = stream
        self.timeout = timeout
        self._is_done = False
        self._engine: ClientEngine | None = None
        self._why: Exception | None = None  # why the last connection brought nothing
        self._scope = trio.CancelScope()

    async def run(self, dial: Dial) -> None:
        """Run the request, and reconnect until it is complete.

        Raises:
            StreamUnavailable: if there was no progress for `timeout` seconds, or if no connection is possible. Time
                inside `on_events` doesn't count.
            StreamBroken: if the server breaks its protocol.
            OptionError: if the transport rejects the address, or if a message is longer than an option allows.
        """
        policy = restream.ClientPolicy(silence=self.silence, linger=CLOSE_TIMEOUT)
        driver = ClientDriver(dial, self, policy, read_bytes=READ_SIZE, closing=self.closing)
        self._scope.deadline = trio.current_time() + self.timeout
        with self._scope:
            try:
                await driver.run()
            except PipelineError:
                raise
            except ValueError as error:  # the transport rejected the address
                hint = "for plaintext beyond loopback set option insecure=true"
                raise OptionError("servers", f"stream {self.stream}: {error}; {hint}") from error
            except NO_CONNECTION as error:
                raise StreamUnavailable(self.stream, f"there can be no connection: {error}", can_heal=False) from error
        if not self._is_done:
            last = driver.outage.last or self._why or driver.loss
            because = "" if last is None else f": {last}"
            raise StreamUnavailable(
                self.stream, f"nothing came within option {self.option}={self.timeout:g} s{because}"
            ) from last

    # --- methods that each kind of request implements

    @abstractmethod
    def next_engine(self) -> ClientEngine:
        """Return an engine for the next connection, which continues where the last one stopped."""

    @abstractmethod
    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        """Handle events. Return True if the request is complete."""

    @abstractmethod
    def on_refusal(self, refused: restream.Refused) -> bool:
        """Handle an error of the server: raise, return True if the request is complete, or return False to retry."""

    # --- methods that the driver calls

    def engine(self) -> ClientEngine:
        self._engine = self.next_engine()
        return self._engine

    async def take(self, events: Sequence[ClientEvent]) -> Ended | Exception | None:
        assert self._engine is not None
        came = False
        for event in events:
            match event:
                case restream.Refused(text) as refused:
                    refused.text = restream.StreamRefused(text).text
                    self._is_done = self.on_refusal(refused)
                    return Ended.DONE if self._is_done else _Refused(f"the server refused: {refused.text}")
                case restream.Failed(error):
                    if error.rule == TOO_LONG:
                        raise OptionError(
                            "maxMessageBytes", f"stream {self.stream} has a longer message: {error.message}"
                        ) from error
                    raise StreamBroken(self.stream, f"the server broke a rule: {error}") from error
                case restream.Silent(seconds):
                    self._why = ConnectionError(f"nothing came for {seconds:g} s while a line was unfinished")
                    return Ended.LOST
                case restream.HungUp():
                    pass
                case _:
                    came = True
        if not came:
            return None
        self._why = None
        self._scope.deadline = math.inf  # time inside `on_events` doesn't count
        self._is_done = await self.on_events(events, self._engine)
        self._scope.deadline = trio.current_time() + self.timeout
        return Ended.DONE if self._is_done else None

    def stopped(self, stop: Stop) -> bool:
        self._is_done = stop in self.complete_after
        return self._is_done


class _Status(_Request):
    def __init__(self, uuid: str, options: SourceOptions) -> None:
        super().__init__(uuid, options.status_timeout)
        self._config = restream.ClientConfig(reader=options.enrolled or None)
        self.answer: Answer | None = None

    def next_engine(self) -> ClientEngine:
        return restream.ClientEngine.status(self.stream, config=self._config)

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, restream.StatusReceived):
                self.answer = event.status or NoStatus.UNKNOWN
        return True

    def on_refusal(self, refused: restream.Refused) -> bool:
        if refused.code in LATER:
            return False
        self.answer = NoStatus.UNKNOWN if refused.code is ErrorCode.UNKNOWN else NoStatus.PLAIN
        return True


class _Statuses(_Status):
    def __init__(self, uuids: Sequence[str], done: Mapping[str, int] | None, options: SourceOptions) -> None:
        super().__init__(uuids[0], options)
        self._config = attrs.evolve(self._config, line=STATUSES_LINE)
        self._uuids = uuids
        self._done = done
        self.answers: dict[str, Answer] | None = None

    def next_engine(self) -> ClientEngine:
        return restream.ClientEngine.status(self.stream, also=self._uuids[1:], done=self._done, config=self._config)

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, restream.StatusReceived) and event.statuses is not None:
                self.answers = {uuid: event.statuses.get(uuid) or NoStatus.UNKNOWN for uuid in self._uuids}
        return True

    def on_refusal(self, refused: restream.Refused) -> bool:
        if not super().on_refusal(refused):
            return False
        # A server that doesn't know one stream may still know the others, if it answers for one at a time.
        self.answers = None if self.answer is NoStatus.UNKNOWN else dict.fromkeys(self._uuids, NoStatus.PLAIN)
        return True


class _Listing(_Request):
    def __init__(self, server: str, since: str, options: SourceOptions) -> None:
        super().__init__("of any name", options.status_timeout)
        self._server = server
        self._since = since
        self._config = restream.ClientConfig(reader=options.enrolled or None, line=STATUSES_LINE)
        self.listing: restream.Listing | None = None

    def next_engine(self) -> ClientEngine:
        return restream.ClientEngine.listing(self._since, config=self._config)

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, restream.ListingReceived):
                self.listing = event.listing
        if self.listing is None:
            raise self._unsupported("it answered a request for a listing with something else")
        return True

    def on_refusal(self, refused: restream.Refused) -> bool:
        if refused.code in LATER:
            return False
        raise self._unsupported(refused.text)

    def _unsupported(self, answer: str) -> OptionError:
        return OptionError(
            "subscribePattern",
            f"{without_secrets(self._server)}: expected a server that lists its sessions, and got: {answer}; "
            "start it with restream.ServerConfig(status=True, listing=True) or `--listing`, or name the streams",
        )


class _Reading(_Request):
    """Reads a session from a certain message on, over any number of connections."""

    option = "readTimeout"

    def __init__(
        self,
        uuid: str,
        begin: int,
        options: SourceOptions,
        *,
        reader: str | None = "",
        incarnation: str | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(uuid, options.read_timeout)
        self.last = begin
        """The message after which the next connection continues."""
        self._config = restream.ClientConfig(
            ack_every=None, line=options.message_bytes, reader=reader, incarnation=incarnation, until=until
        )
        self._fresh = BlockEngine.stateful(uuid, None, verifier=restream.Unverified()).snapshot()

    def next_engine(self) -> ClientEngine:
        saved = {**self._fresh, "id": self.last}
        return BlockEngine.restore(saved, verifier=restream.Unverified(), config=self._config)

    def on_refusal(self, refused: restream.Refused) -> bool:
        asked = f"messages after {self.last} were asked for"
        if refused.code in LOST:
            problem = f"{asked}, and the server says: {refused.text}"
            raise DataLoss(self.stream, problem, acknowledged=refused.acknowledged)
        if refused.code is None:
            raise StreamUnavailable(self.stream, f"{asked} and refused: {refused.text}")
        return False


class _Range(_Reading):
    """Reads a range of messages, and verifies the CRC of their numbers if the options request it."""

    def __init__(self, span: Span, take: Take, options: SourceOptions) -> None:
        super().__init__(span.uuid, span.begin, options, incarnation=span.incarnation, until=span.end)
        self._end = span.end
        self._take = take
        self._may_lose = not options.fail_on_data_loss
        self._verifier = restream.NumbersVerifier()
        # The CRC covers all messages of the stream, so it can be verified only from the first one on.
        self._verifies = options.verify is Verify.NUMBERS and span.begin == 0
        self._check = self._verifier.begin()

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for block in blocks_of(events):
            if block.first > self._end:  # a server that doesn't know `until` sends more
                break
            wanted, _ = block.split(self._end - block.first + 1)
            if self._verifies:
                self._verify(wanted)
            await self._take(wanted)
            self.last = wanted.last
        return self.last >= self._end

    def _verify(self, block: Block) -> None:
        for message in block.messages():
            data = decoded(self.stream, message)
            try:
                self._check = self._verifier.follow(self._check, data)
            except RemoteProtocolError as error:
                raise StreamBroken(self.stream, f"the server broke a rule: {error}") from error
            if self._verifier.is_final(data) and message.id < self._end:
                raise DataLoss(self.stream, f"it ends with message {message.id}, and {self._end} was known")

    def on_refusal(self, refused: restream.Refused) -> bool:
        if not self._may_lose or refused.code not in LOST:
            return super().on_refusal(refused)
        # log: The server has deleted messages that the query didn't read, and `failOnDataLoss` is off.
        _log.warning("stream %s: messages after %d are lost, the server says: %s", self.stream, self.last, refused.text)
        gone = refused.acknowledged
        if gone is None or not self.last < gone < self._end:
            return True
        self.last, self._verifies = gone, False
        return False


class _Count(_Reading):
    # A lost connection looks like an orderly close. Messages that were missed are counted next time.
    complete_after = (Stop.SILENCE, Stop.HUNG_UP)

    def __init__(self, uuid: str, begin: int, most: int, most_bytes: int | None, options: SourceOptions) -> None:
        super().__init__(uuid, begin, options)
        self.silence = options.prefetch_wait
        self._bytes = 0
        self._end = begin + most
        self._most_bytes = most_bytes

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        await trio.lowlevel.checkpoint()
        for block in blocks_of(events):
            for self.last, size in enumerate(block.sizes, block.first):
                self._bytes += size
                if self.last >= self._end or (self._most_bytes is not None and self._bytes >= self._most_bytes):
                    return True
        return False


class _Acknowledge(_Reading):
    """Reads the last message again and acknowledges it. A server accepts an acknowledgement only after a read."""

    option = "ackTimeout"
    closing = Closing.CONFIRMED

    def __init__(self, uuid: str, id: int, options: SourceOptions) -> None:
        super().__init__(uuid, id - 1, options, reader=options.reader or None)
        self.timeout = options.ack_timeout
        self._id = id

    async def on_events(self, events: Sequence[ClientEvent], engine: ClientEngine) -> bool:
        for event in events:
            if isinstance(event, ReceivedBlock) and event.block.first == self._id:
                engine.taken(event)
                engine.acknowledge(self._id)
                return True
        return False

    def on_refusal(self, refused: restream.Refused) -> bool:
        if (refused.acknowledged or 0) >= self._id:
            return True
        return super().on_refusal(refused)
