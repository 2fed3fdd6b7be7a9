"""Work goes on over one connection after another, with the pauses that the policy asks for."""

from __future__ import annotations

import errno
import random
import socket
import ssl
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from muxkit import LinkLost, Refused, RemoteProtocolError
from muxkit.runtime import Backoff, Ended, Outage, can_heal, redial
from muxkit_adapters import memory, tcp
from muxkit_adapters.tls import HandshakeFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from trio.testing import MockClock

pytestmark = pytest.mark.requirement("R-51")

REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "no server is there")


@attrs.define
class Network:
    """Says of each attempt whether it connects, and remembers when it was made."""

    refuses: int = 0
    error: Exception = REFUSED
    at: list[float] = attrs.field(factory=list)
    left: int = 0
    peers: list[trio.abc.Stream] = attrs.field(factory=list)

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        self.at.append(trio.current_time())
        if len(self.at) <= self.refuses:
            raise self.error
        ours, theirs = memory.pair()
        self.peers.append(theirs)
        try:
            async with ours:
                yield ours
        finally:
            self.left += 1

    @property
    def pauses(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


async def done(stream: trio.abc.Stream) -> Ended:
    return Ended.DONE


@attrs.define
class Story:
    """What `run` says of one connection after another, and how long each is held; DONE in the end."""

    says: list[Ended | Exception]
    held: float = 0.0
    streams: list[trio.abc.Stream] = attrs.field(factory=list)

    async def run(self, stream: trio.abc.Stream) -> Ended | Exception:
        self.streams.append(stream)
        if not self.says:
            return Ended.DONE
        await trio.sleep(self.held)
        return self.says.pop(0)


async def test_it_ends_when_all_is_done(autojump_clock: MockClock) -> None:
    network = Network()
    await redial(network.dial, done)
    assert (len(network.at), network.left) == (1, 1)


async def test_failed_attempts_are_repeated_until_one_succeeds(autojump_clock: MockClock) -> None:
    network = Network(refuses=5)
    await redial(network.dial, done)
    assert len(network.at) == 6


async def test_the_pauses_after_failures_are_those_of_the_policy(autojump_clock: MockClock) -> None:
    network = Network(refuses=20)
    await redial(network.dial, done, backoff=Backoff(random=random.Random(7)))
    again = Backoff(random=random.Random(7))
    assert network.pauses == pytest.approx([again.wait(failures) for failures in range(1, 21)])


def test_the_bound_of_a_pause_doubles_up_to_the_most() -> None:
    class Greatest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    policy = Backoff(first=0.1, most=30.0, random=Greatest())
    bounds = [policy.wait(failures) for failures in range(1, 12)]
    assert bounds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])
    assert policy.wait(10**6) == 30.0


def test_a_pause_is_anything_from_nothing_to_its_bound() -> None:
    policy = Backoff(first=1.0, random=random.Random(1))
    waits = [policy.wait(1) for _ in range(1000)]
    assert min(waits) < 0.05
    assert max(waits) > 0.95
    assert all(0.0 <= wait <= 1.0 for wait in waits)


@pytest.mark.seeds(20, soak=1000)
def test_a_protocol_can_say_how_short_a_pause_may_be(seed: int) -> None:
    policy = Backoff(first=5.0, least=5.0, most=30.0, random=random.Random(seed))
    waits = [policy.wait(failures) for failures in range(1, 50)]
    assert 5.0 <= waits[0] <= 10.0
    assert all(5.0 <= wait <= 30.0 for wait in waits)


@pytest.mark.parametrize("wrong", [{"first": -1.0}, {"most": float("inf")}, {"least": 31.0}])
def test_a_policy_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"Backoff\("):
        Backoff(**wrong)  # type: ignore[arg-type]  # all of these are floats


async def test_after_a_drop_it_dials_at_once(autojump_clock: MockClock) -> None:
    network, story = Network(), Story([Ended.LOST] * 5, held=1.5)
    await redial(network.dial, story.run)
    assert network.pauses == pytest.approx([1.5] * 5)


async def test_a_connection_that_worked_may_have_been_as_short_as_it_likes(autojump_clock: MockClock) -> None:
    network = Network()
    await redial(network.dial, Story([Ended.WORKED] * 1000).run)
    assert network.at[-1] == network.at[0]


async def test_many_short_connections_in_a_row_can_be_paced_though_they_worked(autojump_clock: MockClock) -> None:
    """A server that serves a little and hangs up is not dialled thousands of times a second; the pauses do not grow."""
    network, failures = Network(), list[Exception]()
    story = Story([Ended.WORKED] * 1000)
    await redial(network.dial, story.run, on_failed=lambda error, _: failures.append(error), breath=0.1)
    assert 20 < network.at[-1] - network.at[0] < 100
    assert network.pauses[:8] == [0.0] * 8
    assert max(network.pauses) <= 0.1
    assert failures == []


async def test_a_longer_connection_ends_the_pacing(autojump_clock: MockClock) -> None:
    network = Network()
    await redial(network.dial, Story([Ended.WORKED] * 100, held=1.0).run, breath=0.1)
    assert network.pauses == pytest.approx([1.0] * 100)


async def test_connections_that_die_at_once_count_as_failures(autojump_clock: MockClock) -> None:
    network, failures = Network(), list[Exception]()
    story = Story([Ended.LOST] * 30, held=0.01)
    await redial(network.dial, story.run, on_failed=lambda error, _: failures.append(error))
    assert network.at[-1] - network.at[0] > 60
    assert str(failures[0]) == "connection lost after 0.01 s"


async def test_a_connection_can_say_why_it_failed(autojump_clock: MockClock) -> None:
    network, told = Network(), list[tuple[Exception, float]]()
    reason = ConnectionError("not this version")
    await redial(network.dial, Story([reason]).run, on_failed=lambda error, wait: told.append((error, wait)))
    assert [error for error, _ in told] == [reason]
    assert network.pauses == pytest.approx([wait for _, wait in told])


async def test_a_stable_connection_wipes_out_the_failures_before_it(autojump_clock: MockClock) -> None:
    network, outage = Network(refuses=9), Outage()
    story = Story([Ended.LOST], held=30.1)
    network_of_later = Network(refuses=0)
    await redial(network.dial, story.run, outage=outage)
    assert outage.failures == 0
    story = Story([Ended.LOST], held=29.9)
    network_of_later.refuses = 9
    await redial(network_of_later.dial, story.run, outage=outage)
    assert outage.failures == 9


async def test_the_next_connection_is_dialled_when_the_one_before_is_closed(autojump_clock: MockClock) -> None:
    network = Network()

    async def run(stream: trio.abc.Stream) -> Ended:
        assert network.left == len(network.at) - 1
        return Ended.WORKED if len(network.at) < 5 else Ended.DONE

    await redial(network.dial, run)
    assert network.left == 5


class Polite(trio.abc.Stream):
    """Takes leave for five seconds, once; nothing else works."""

    _has_left = False

    async def aclose(self) -> None:
        if not self._has_left:
            self._has_left = True
            await trio.sleep(5)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        raise NotImplementedError

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raise NotImplementedError


async def test_no_leave_is_taken_of_somebody_who_is_gone(autojump_clock: MockClock) -> None:
    starts = []

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        starts.append(trio.current_time())
        async with Polite() as stream:
            yield stream

    await redial(dial, Story([Ended.WORKED]).run)
    assert starts[1] == starts[0]
    assert trio.current_time() == pytest.approx(starts[1] + 5.0)  # of the last one leave is taken


@pytest.mark.parametrize(
    "error",
    [
        ValueError("address 'x'"),
        OSError(errno.EAFNOSUPPORT, "no such family"),
        ssl.SSLCertVerificationError(1, "self-signed"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_can_never_succeed_is_raised_at_once(error: Exception, autojump_clock: MockClock) -> None:
    network = Network(refuses=100, error=error)
    with pytest.raises(type(error)) as caught:
        await redial(network.dial, done)
    assert caught.value is error
    assert len(network.at) == 1


def test_a_refused_certificate_is_seen_below_the_error_of_an_adapter() -> None:
    failure = HandshakeFailed("tls example.org:7000: the certificate was refused")
    failure.__cause__ = ssl.SSLCertVerificationError(1, "expired")
    assert not can_heal(failure)
    assert can_heal(HandshakeFailed("the peer hung up during the TLS handshake"))
    assert can_heal(REFUSED)


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _lost(**more: Any) -> LinkLost:
    return LinkLost("it is lost", by="peer", **more)


FINAL = {
    "no token": _lost(code=401),
    "no such path": HandshakeFailed("404", status=404),
    "a web page": HandshakeFailed("200", status=200),
    "another protocol": _lost(found="bpmux"),
    "another protocol in the handshake": HandshakeFailed("SSH", found="SSH"),
    "no certificate": HandshakeFailed("certificate required", alert="certificate required"),
    "no certificate, known later": _caused(_lost(), ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]")),
    "refused": _caused(_lost(), Refused()),
    "refused by a listener": Refused(),
    "a rule broken by the first byte": _caused(_lost(), RemoteProtocolError("nonsense", offset=0)),
    "a rule broken in the handshake": RemoteProtocolError("nonsense"),
}
FINAL["no certificate, known later"].__cause__.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"  # type: ignore[union-attr]

PASSING = {
    "lost": _lost(),
    "an error of the server": _lost(code=500),
    "we broke a rule": _lost(code=400),
    "too many requests": Refused(code=429),
    "too many connections": HandshakeFailed("503", status=503),
    "a rule broken later": _caused(_lost(), RemoteProtocolError("nonsense", offset=7000)),
    "an internal error": HandshakeFailed("internal error", alert="internal error"),
}


@pytest.mark.parametrize("error", FINAL.values(), ids=FINAL)
def test_what_waiting_cannot_change_is_final(error: Exception) -> None:
    assert not can_heal(error)


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
def test_what_waiting_can_change_is_not_final(error: Exception) -> None:
    assert can_heal(error)


async def test_what_run_raises_comes_out_as_it_is(autojump_clock: MockClock) -> None:
    error, network = ConnectionResetError("out of run"), Network()

    async def run(stream: trio.abc.Stream) -> Ended:
        raise error

    with pytest.raises(ConnectionResetError) as caught:
        await redial(network.dial, run)
    assert caught.value is error
    assert (len(network.at), network.left) == (1, 1)


async def test_trouble_with_closing_changes_nothing(autojump_clock: MockClock) -> None:
    network = Network()

    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        async with network.dial() as stream:
            yield stream
        raise trio.BrokenResourceError("the goodbye failed")

    await redial(dial, Story([Ended.WORKED]).run)
    assert len(network.at) == 2


async def test_a_dial_that_swallows_errors_is_a_mistake(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def dial() -> AsyncIterator[trio.abc.Stream]:
        ours, _ = memory.pair()
        try:
            yield ours
        except KeyError:
            return

    async def run(stream: trio.abc.Stream) -> Ended:
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match="swallowed"):
        await redial(dial, run)


@pytest.mark.parametrize("when", ["dialling", "running", "waiting"])
async def test_it_can_be_cancelled_at_any_time(when: str, autojump_clock: MockClock) -> None:
    network = Network(refuses=10**6 if when == "waiting" else 0)

    @asynccontextmanager
    async def never() -> AsyncIterator[trio.abc.Stream]:
        await trio.sleep_forever()
        yield memory.pair()[0]

    async def hold(stream: trio.abc.Stream) -> Ended:
        await trio.sleep_forever()
        return Ended.DONE

    with trio.move_on_after(100) as scope:
        await redial(never if when == "dialling" else network.dial, hold)
    assert scope.cancelled_caught
    assert network.left == len(network.peers)


async def test_it_gives_up_by_the_callers_deadline_and_says_what_was_wrong(autojump_clock: MockClock) -> None:
    network, outage = Network(refuses=10**6), Outage()
    with pytest.raises(trio.TooSlowError, match=r"not within 60 s.*no server is there") as caught:
        with outage.fail_after(60):
            await redial(network.dial, done, outage=outage)
    assert caught.value.__cause__ is REFUSED


async def test_a_deadline_of_somebody_else_is_left_alone(autojump_clock: MockClock) -> None:
    outage = Outage(last=REFUSED)
    with pytest.raises(trio.TooSlowError) as caught:
        with outage.fail_after(60), trio.fail_after(1):
            await trio.sleep_forever()
    assert caught.value.__cause__ is None


async def test_a_good_connection_explains_nothing_away(autojump_clock: MockClock) -> None:
    network, outage = Network(refuses=3), Outage()

    async def run(stream: trio.abc.Stream) -> Ended:
        assert outage.last is REFUSED
        outage.over()
        await trio.sleep_forever()
        return Ended.DONE

    with pytest.raises(trio.TooSlowError) as caught:
        with outage.fail_after(60):
            await redial(network.dial, run, outage=outage)
    assert caught.value.__cause__ is None
    assert outage.failures == 3


@pytest.fixture
def kept_port() -> Iterator[int]:
    """A port for a server that comes and goes: while it is away this socket keeps it, and the kernel refuses."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield place.getsockname()[1]


async def test_it_finds_a_server_that_comes_back_to_its_port(kept_port: int) -> None:
    async def echo(stream: trio.abc.Stream) -> None:
        while data := await stream.receive_some():
            await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(tcp.serve, echo, kept_port))
        nursery.cancel_scope.cancel()
    answers = []

    async def ask(stream: trio.abc.Stream) -> Ended:
        await stream.send_all(b"there?")
        answers.append(await stream.receive_some())
        return Ended.DONE

    async with trio.open_nursery() as nursery:
        refused = trio.Event()

        async def come_back(task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            await refused.wait()
            await tcp.serve(echo, kept_port)

        await nursery.start(come_back)
        await redial(
            lambda: tcp.connect("127.0.0.1", kept_port),
            ask,
            backoff=Backoff(most=0.1),
            on_failed=lambda error, wait: refused.set(),
        )
        nursery.cancel_scope.cancel()
    assert answers == [b"there?"]
