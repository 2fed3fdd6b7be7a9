"""The handshake at the start of a connection, as one small engine for each side.

The connector sends the version that it offers, and a request: the endpoint that it wants, the sizes of channel ids,
whether there are transactions, and the link that it wants to continue, if it has one. The listener answers with its
version, and with the epoch and the id of the link for this connection. Packets follow after that.

`ConnectorHandshake` and `ListenerHandshake` are `StreamEngine`s, so they do no I/O. Each ends with one of the events
`Agreed`, `Refused`, `HungUp` or `Failed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core import Buffer
from muxkit.core.events import Failed, HungUp
from muxkit.protocols.relink.config import LARGEST_ID_SIZE, Config
from muxkit.protocols.relink.events import Agreed, HandshakeEvent, Refused, Requested

# How many bytes a connector may send before the listener's answer. The longest valid request has 296 bytes.
MOST_BYTES: Final = 1024
LARGEST_LINK_ID: Final = 2**63 - 1
U64_MAX: Final = 2**64 - 1

VERSION_SIZE: Final = 8
ANSWER_SIZE: Final = 16
CONNECTOR_TRANSACTIONS: Final = 1
LISTENER_TRANSACTIONS: Final = 2
REQUIRE_LINK: Final = 4


def epoch_of(seconds: float) -> int:
    """Return the epoch of a listener that started at this time, in seconds since 1970-01-01 UTC."""
    return round(seconds * 1_000_000)


def encode_version(version: int) -> bytes:
    return version.to_bytes(VERSION_SIZE, "little")


def encode_request(config: Config, *, epoch: int = 0, link_id: int = 0, require_link: bool = False) -> bytes:
    """Encode the connector's request, which follows the version."""
    name = config.endpoint.encode()
    flags = CONNECTOR_TRANSACTIONS * config.connector_transactions
    flags |= LISTENER_TRANSACTIONS * config.listener_transactions | REQUIRE_LINK * require_link
    head = bytes((len(name),)) + name + bytes((config.connector_id_size, config.listener_id_size, flags))
    return head + bytes(-len(head) % 8) + epoch.to_bytes(8, "little") + link_id.to_bytes(8, "little")


def encode_answer(epoch: int, link_id: int) -> bytes:
    """Encode the listener's answer to a request."""
    return epoch.to_bytes(8, "little") + link_id.to_bytes(8, "little")


def mismatch(request: Requested, config: Config) -> RemoteProtocolError | None:
    """Compare a request with the settings of its endpoint, and return an error if they differ."""
    for side in ("connector", "listener"):
        asked, ours = getattr(request, f"{side}_transactions"), getattr(config, f"{side}_transactions")
        if asked != ours:
            what = f"endpoint {request.endpoint!r}: transactions of the {side} asked {asked}, here {ours}"
            return RemoteProtocolError(what, rule="relink-H23")
        asked, ours = getattr(request, f"{side}_id_size"), getattr(config, f"{side}_id_size")
        if asked != ours:
            what = f"endpoint {request.endpoint!r}: channel ids of the {side} have {asked} bytes, here {ours}"
            return RemoteProtocolError(what, rule="relink-H24")
    return None


class _Handshake:
    """The part of the handshake that both sides share: buffering, the deadline, and the methods of a `StreamEngine`."""

    def __init__(self, now: float, limits: Limits | None) -> None:
        self._seconds = (limits or Limits()).handshake
        self._deadline = now + self._seconds
        self._held = bytearray()
        # The offset of the first byte in `_held` in the received stream.
        self._offset = 0
        self._out = bytearray()
        self._events: list[HandshakeEvent] = []
        # True if the handshake has ended and hasn't failed, so that further bytes are packets.
        self._is_done = False
        self._version: int | None = None
        self.over: bool = False
        """True once the handshake has ended. Bytes that arrive afterwards are returned by `rest`."""

    def rest(self) -> bytes:
        """Return the received bytes after the handshake, and remove them. They are the first packets."""
        return self._take(len(self._held))

    def receive_eof(self, now: float) -> None:
        if not self.over:
            self._events.append(HungUp(is_clean=False))
            self._out.clear()
            self.over = True

    def events(self) -> Sequence[HandshakeEvent]:
        events, self._events = self._events, []
        return events

    def has_output(self) -> bool:
        return bool(self._out)

    def buffers_to_send(self, limit: int = MOST_BYTES) -> list[Buffer]:
        out: list[Buffer] = [bytes(self._out)] if self._out else []
        self._out.clear()
        return out

    def next_deadline(self) -> float | None:
        return None if self.over else self._deadline

    def handle_deadline(self, now: float) -> None:
        if not self.over and now >= self._deadline:
            came = self._offset + len(self._held)
            self._fail(f"the handshake is not done after {self._seconds} s; {came} bytes came", limit="handshake")

    def _take(self, size: int) -> bytes:
        taken = bytes(self._held[:size])
        del self._held[:size]
        self._offset += size
        return taken

    def _finish(self, event: HandshakeEvent) -> None:
        self._events.append(event)
        self.over = self._is_done = True

    def _fail(self, what: str, *, rule: str | None = None, limit: str | None = None) -> None:
        self._held.clear()
        self._out.clear()
        self._events.append(Failed(RemoteProtocolError(what, rule=rule, offset=self._offset, limit=limit)))
        self.over = True


class ConnectorHandshake(_Handshake):
    """The connector's side of the handshake.

    `epoch` and `link_id` identify the link to continue; both are 0 for a new link. `Config.require_link` has no effect
    for a new link.
    """

    def __init__(
        self, config: Config, *, now: float, epoch: int = 0, link_id: int = 0, limits: Limits | None = None
    ) -> None:
        super().__init__(now, limits)
        self._config = config
        self._epoch = epoch
        self._link_id = link_id
        self._required = config.require_link and link_id != 0
        self._out += encode_version(max(config.versions))
        # If we offer one version, the listener can only answer with this version or hang up. The request doesn't depend
        # on the answer then, so we don't wait for it and save a round trip.
        self._is_request_sent = len(config.versions) == 1 and not config.half_duplex
        if self._is_request_sent:
            self._out += self._request()

    def _request(self) -> bytes:
        return encode_request(self._config, epoch=self._epoch, link_id=self._link_id, require_link=self._required)

    def receive_bytes(self, data: bytes, now: float) -> None:
        if self.over and not self._is_done:
            return
        self._held += data
        if self._version is None and len(self._held) >= VERSION_SIZE:
            self._take_version()
        if self._version is not None and not self.over and len(self._held) >= ANSWER_SIZE:
            self._take_answer(self._version)

    def _take_version(self) -> None:
        offered = max(self._config.versions)
        version = self._held[0]
        if version > offered or version not in self._config.versions:
            versions = sorted(self._config.versions)
            self._fail(f"the listener answered version {version} to an offer of {versions}", rule="relink-H07")
            return
        self._take(VERSION_SIZE)
        self._version = version
        if not self._is_request_sent:
            self._out += self._request()

    def _take_answer(self, version: int) -> None:
        epoch = int.from_bytes(self._held[:8], "little")
        link_id = int.from_bytes(self._held[8:16], "little")
        if link_id > LARGEST_LINK_ID:
            self._fail(f"link id {link_id:#x} is above 2^63-1", rule="relink-H27")
        elif link_id == 0 and not self._required:
            self._fail("link id 0, though no old link was required", rule="relink-H33")
        elif link_id == 0:
            self._take(ANSWER_SIZE)
            self._finish(Refused(epoch))
        else:
            self._take(ANSWER_SIZE)
            # Epoch 0 identifies no instance of a listener, so there is no link to resume.
            resumed = (epoch, link_id) == (self._epoch, self._link_id) and epoch != 0
            self._finish(Agreed(version, epoch, link_id, resumed))


class ListenerHandshake(_Handshake):
    """The listener's side of the handshake.

    It reports `Requested`, and the listener then has to call `accept`, `resume`, `refuse` or `terminate`. After the
    final event there may still be bytes to write.
    """

    def __init__(self, *, now: float, versions: Iterable[int] = (0,), limits: Limits | None = None) -> None:
        super().__init__(now, limits)
        self._versions = frozenset(versions)
        self._request: Requested | None = None

    # --- decisions about a `Requested`

    def accept(self, epoch: int, link_id: int) -> None:
        """Accept the request with a new link.

        `epoch` is the listener's epoch, and `link_id` must never have been used in this epoch.
        """
        if not 1 <= link_id <= LARGEST_LINK_ID:
            raise LocalProtocolError(f"link id {link_id} is not in 1..2^63-1")
        self._answer(epoch, link_id, resumed=False)

    def resume(self) -> None:
        """Accept the request, and continue the link that the connector asked for."""
        request = self._decided()
        if not (request.link_id and request.epoch):
            raise LocalProtocolError(f"epoch {request.epoch} and link id {request.link_id} name no link")
        self._answer(request.epoch, request.link_id, resumed=True)

    def refuse(self, epoch: int) -> None:
        """Refuse the request, because the connector requires a link that the listener doesn't know.

        The answer has link id 0. The listener has to end the connection after writing the answer.
        """
        self._check_epoch(epoch)
        self._decided()
        self._out += encode_answer(epoch, 0)
        self._finish(Refused(epoch))

    def terminate(self, error: RemoteProtocolError) -> None:
        """End the handshake without an answer, because the endpoint doesn't exist or doesn't match the request.

        `Failed` reports `error`.
        """
        self._decided()
        self._fail(error.message, rule=error.rule, limit=error.limit)

    def _decided(self) -> Requested:
        if self._request is None or self.over:
            raise LocalProtocolError("there is no request to decide about")
        return self._request

    def _check_epoch(self, epoch: int) -> None:
        if not 1 <= epoch <= U64_MAX:
            raise LocalProtocolError(f"epoch {epoch} is not in 1..2^64-1")

    def _answer(self, epoch: int, link_id: int, *, resumed: bool) -> None:
        self._check_epoch(epoch)
        request = self._decided()
        self._out += encode_answer(epoch, link_id)
        self._finish(Agreed(request.version, epoch, link_id, resumed))

    # --- the stream

    def receive_bytes(self, data: bytes, now: float) -> None:
        if self.over and not self._is_done:
            return
        room = len(data) if self.over else MOST_BYTES - self._offset - len(self._held)
        self._held += data[:room]
        if self._version is None and len(self._held) >= VERSION_SIZE:
            self._take_version()
        if self._version is not None and self._request is None and not self.over:
            self._take_request(self._version)
        if len(data) > room and not self.over:
            self._fail(f"more than {MOST_BYTES} bytes came before the handshake was done", rule="relink-H04")

    def _take_version(self) -> None:
        offered = self._held[0]
        usable = [version for version in self._versions if version <= offered]
        if not usable:
            what = f"version {offered} offered, {sorted(self._versions)} understood"
            self._fail(what, rule="relink-H07")
            return
        self._take(VERSION_SIZE)
        self._version = max(usable)
        self._out += encode_version(self._version)

    def _take_request(self, version: int) -> None:
        held = self._held
        if not held:
            return
        name_end = 1 + held[0]
        size = (name_end + 3 + 7) // 8 * 8 + 16
        if len(held) < size:
            return
        try:
            endpoint = held[1:name_end].decode()
        except UnicodeDecodeError:
            self._fail(f"an endpoint name of {held[0]} bytes that is not UTF-8", rule="relink-H10")
            return
        connector_id_size, listener_id_size, flags = held[name_end : name_end + 3]
        for side, id_size in (("connector", connector_id_size), ("listener", listener_id_size)):
            if id_size > LARGEST_ID_SIZE:
                what = f"channel ids of the {side} with {id_size} bytes; at most {LARGEST_ID_SIZE} are possible"
                self._fail(what, rule="relink-H12")
                return
        epoch = int.from_bytes(held[size - 16 : size - 8], "little")
        link_id = int.from_bytes(held[size - 8 : size], "little")
        if link_id > LARGEST_LINK_ID:
            self._fail(f"link id {link_id:#x} is above 2^63-1", rule="relink-H27")
            return
        self._take(size)
        self._request = Requested(
            version=version,
            endpoint=endpoint,
            connector_id_size=connector_id_size,
            listener_id_size=listener_id_size,
            connector_transactions=bool(flags & CONNECTOR_TRANSACTIONS),
            listener_transactions=bool(flags & LISTENER_TRANSACTIONS),
            require_link=bool(flags & REQUIRE_LINK),
            epoch=epoch,
            link_id=link_id,
        )
        self._events.append(self._request)
