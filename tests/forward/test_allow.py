"""What is not allowed is not reached: rules, names that lead elsewhere, and listeners."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import muxkit
from muxkit import forward
from muxkit.forward.server import LOGGED_EVERY, LOGGED_MOST
from muxkit.forward.sockets import Lookups
from muxkit.forward.wire import NAME, Connect, Listen, Take, ask, encode
from tests.forward._targets import PATIENCE, dial, echo, names, pair, read_all, target, until_refused

URL = "bpmux+mem://allow"
LOCAL = ("127.0.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1", "0.0.0.0", "::")
PRIVATE = ("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "fe80::1", "fd00::1", "fec0::1")


def allows(rules: list[str], host: str, port: int, name: str | None = None) -> bool:
    address = forward.Address(host).ip
    assert address is not None
    return forward.AllowList(rules).allows(name, address, port)


@pytest.mark.parametrize(
    ("rule", "yes", "no"),
    [
        ("5432", ["127.0.0.1:5432", "[::1]:5432"], ["127.0.0.1:5433", "10.0.0.1:5432", "8.8.8.8:5432"]),
        ("loopback:*", ["127.8.8.8:1", "[::ffff:127.0.0.1]:65535"], ["10.0.0.1:1"]),
        ("10.0.0.0/8:80,8000-8100", ["10.1.2.3:80", "10.1.2.3:8100"], ["10.1.2.3:81", "11.0.0.1:80"]),
        ("[fd00::/8]:22", ["[fd00::1]:22"], ["[fe80::1]:22", "10.0.0.1:22"]),
        ("private:22", ["192.168.0.1:22", "[fd00::1]:22"], ["127.0.0.1:22", "8.8.8.8:22", "169.254.169.254:22"]),
        ("*:443", ["8.8.8.8:443", "[2606:4700::1]:443"], ["127.0.0.1:443", "10.0.0.1:443", "0.0.0.0:443"]),
        ("any:443", ["8.8.8.8:443", "127.0.0.1:443", "169.254.169.254:443"], ["8.8.8.8:80"]),
    ],
)
def test_a_rule_allows_its_addresses_and_no_others(rule: str, yes: list[str], no: list[str]) -> None:
    allow = forward.AllowList([rule])
    for text in (*yes, *no):
        address = forward.parse_address(text)
        assert address.ip is not None
        assert allow.allows(None, address.ip, address.port) is (text in yes), text


@pytest.mark.parametrize("address", [*LOCAL, *PRIVATE, "224.0.0.1"])
def test_a_name_that_leads_to_an_address_that_is_not_public_needs_a_rule_that_says_so(address: str) -> None:
    assert not allows(["*:*", "*.example.com:*"], address, 80, "www.example.com")
    assert allows(["*.example.com@any:*"], address, 80, "www.example.com")
    assert not allows(["*.example.com@any:*"], address, 80, "www.example.org")
    assert not allows(["*.example.com@any:*", f"![{address}]:*"], address, 80, "www.example.com")


@pytest.mark.parametrize("form", ["64:ff9b::{}", "2002:{}::1", "::{}"])
def test_a_rule_about_this_machine_or_a_private_network_is_not_about_a_translator(form: str) -> None:
    """`64:ff9b::127.0.0.1` is not reached here: a packet to it leaves this machine."""
    for network, embedded in (("loopback", "7f00:1"), ("10.0.0.0/8", "a00:1"), ("private", "c0a8:1")):
        address = form.format(embedded)
        assert not allows([f"{network}:*"], address, 5432)
        assert not allows(["any:*", f"!{network}:*"], address, 5432)


def test_a_rule_about_a_public_address_is_about_its_translated_form() -> None:
    for rule in ("*:443", "8.8.8.0/24:443"):
        assert allows([rule], "64:ff9b::8.8.8.8", 443)


def test_what_is_denied_is_not_allowed_whatever_else_is() -> None:
    rules = ["any:*", "!10.0.0.0/8:*", "!evil.example.com:*"]
    assert not allows(rules, "10.0.0.1", 80)
    assert not allows(rules, "8.8.8.8", 80, "evil.example.com")
    assert allows(rules, "8.8.8.8", 80, "good.example.com")


@pytest.mark.parametrize(
    ("rule", "yes", "no"),
    [
        ("/run/app/*.sock", ["/run/app/a.sock"], ["/run/app/deep/a.sock", "/run/other/a.sock", "/run/a.sock"]),
        ("/run/app.sock", ["/run/app.sock", "/run//app.sock"], ["/run/app.sock2", "/run/app"]),
    ],
)
def test_a_path_is_compared_part_by_part(rule: str, yes: list[str], no: list[str]) -> None:
    for path in (*yes, *no):
        assert forward.AllowList([rule]).allows_path(forward.parse_address(path).path) is (path in yes), path


@pytest.mark.parametrize(
    "rule", ["", "host", "host:", "host:99999", "host:9-8", "ho st:80", "10.0.0.1/8:80", "a@b:80", "/a/../b", "h:80,"]
)
def test_a_faulty_rule_says_what_was_expected(rule: str) -> None:
    with pytest.raises(ValueError, match=r"rule .*expected|no \.\."):
        forward.AllowList([rule])


@pytest.mark.parametrize(
    "text",
    [
        *("", "host:0", "host:x", "::1:80", "[db]:80", "a b:80", "/run/../x", "/run/a\nb", "x" * 300 + ":80"),
        *("[fe80::1%\x1b[31mred\nroot: fine]:80", "[::1%" + "x" * 1500 + "]:80", "[::1%a b]:80"),
    ],
)
def test_a_faulty_address_says_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|no \.\.|must be|control|interface"):
        forward.parse_address(text)


@pytest.mark.parametrize(
    ("text", "bind", "to"),
    [
        ("8080:db:5432", "127.0.0.1:8080", "db:5432"),
        ("8080:3000", "127.0.0.1:8080", "127.0.0.1:3000"),
        ("0.0.0.0:8080:db:5432", "0.0.0.0:8080", "db:5432"),
        ("[::1]:8080:[fd00::1]:80", "[::1]:8080", "[fd00::1]:80"),
        ("0:/run/app.sock", "127.0.0.1:0", "/run/app.sock"),
        ("/run/db.sock:db:5432", "/run/db.sock", "db:5432"),
        ("localhost:8080:3000", "localhost:8080", "127.0.0.1:3000"),
        ("/run/a:b.sock=DB.example.com.:5432", "/run/a:b.sock", "db.example.com:5432"),
    ],
)
def test_a_forward_is_written_as_for_ssh(text: str, bind: str, to: str) -> None:
    assert [str(each) for each in forward.parse_forward(text)] == [bind, to]


@pytest.mark.parametrize("text", ["8080", "8080:db:5432:9:9", "a:b:c", "8080:", "[::1:80:80"])
def test_a_faulty_forward_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        forward.parse_forward(text)


# ---------------------------------------------------------------------------- a server


async def test_a_name_that_resolves_to_loopback_reaches_nothing() -> None:
    resolver = names()
    resolver.known["www.example.com"] = ["127.0.0.1", "::1", "10.0.0.1"]
    reached = trio.Event()

    async def touched(stream: trio.SocketStream) -> None:
        reached.set()

    with trio.fail_after(PATIENCE):
        async with target(touched) as port, pair(URL, ["*:*", "*.example.com:*"]) as there:
            with pytest.raises(forward.ForwardRefused, match="an address that is not allowed here") as caught:
                await ask(there.session, Connect(f"www.example.com:{port}"))
            assert caught.value.code == forward.Code.NOT_ALLOWED
            for literal in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "localhost"):
                with pytest.raises(forward.ForwardRefused):
                    await ask(there.session, Connect(f"{literal}:{port}"))
            await trio.testing.wait_all_tasks_blocked()
    assert not reached.is_set()


async def test_the_address_that_was_judged_is_the_one_that_is_connected_to() -> None:
    """A name server that answers differently the second time changes nothing, and the forbidden address is left out."""
    resolver = names()
    resolver.known["app.test"] = ["10.0.0.1", "127.0.0.1"]
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(URL, [f"app.test@loopback:{port}"]) as there:
            channel, done = await ask(there.session, Connect(f"app.test:{port}"))
            assert done.address == f"app.test:{port}"
            channel.abort()
    assert resolver.asked.count("app.test") == 1


async def test_a_name_that_no_rule_is_about_is_not_even_looked_up() -> None:
    resolver = names()
    async with pair(URL, ["*.example.com:443", "10.0.0.0/8:80"]) as there:
        for wanted in ("secret.attacker.test:443", "www.example.com:444", "www.example.com:22"):
            with pytest.raises(forward.ForwardRefused) as caught:
                await ask(there.session, Connect(wanted))
            assert caught.value.code in (forward.Code.NOT_ALLOWED, forward.Code.MALFORMED, forward.Code.NOT_FOUND)
    assert "secret.attacker.test" not in resolver.asked


async def test_names_that_no_name_server_answers_leave_room_for_other_clients() -> None:
    resolver = names()
    resolver.silent = {f"name-{number}.example.com" for number in range(100)}
    resolver.known["app.test"] = ["127.0.0.1"]
    limits = forward.ForwardLimits(lookups=3)
    with trio.fail_after(PATIENCE):
        async with target() as port:
            handler = forward.handler(["*:443", f"app.test@loopback:{port}"], limits=limits)
            async with (
                muxkit.open_server(handler, URL) as server,
                muxkit.connect(server.url) as hostile,
                muxkit.connect(server.url) as other,
                trio.open_nursery() as nursery,
            ):

                async def ask_for(name: str) -> None:
                    with pytest.raises(forward.ForwardRefused, match="not found"):
                        await ask(hostile, Connect(f"{name}:443"))

                for name in resolver.silent:
                    nursery.start_soon(ask_for, name)
                while handler.stats().connections < len(resolver.silent):
                    await trio.testing.wait_all_tasks_blocked()
                await ask(other, Connect(f"app.test:{port}"))
                waiting = resolver.waiting
                resolver.answer.set()
    assert waiting == 3


async def test_a_lookup_counts_until_its_thread_is_done() -> None:
    resolver = names()
    resolver.silent = {"silent.test"}
    resolver.known["app.test"] = ["127.0.0.1"]
    lookups = Lookups(3)
    silent, known = forward.Address("silent.test", 443), forward.Address("app.test", 443)
    with trio.fail_after(PATIENCE):
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(lookups.look_up, silent, "hostile")
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        waiting = resolver.waiting
        assert await lookups.look_up(known, "other") == ["127.0.0.1"]
        resolver.answer.set()
        assert waiting == 3
        assert await lookups.look_up(known, "hostile") == ["127.0.0.1"]


async def test_a_server_without_rules_reaches_nothing_and_listens_nowhere() -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(URL) as there:
            for wanted in (Connect(f"127.0.0.1:{port}"), Connect("/run/x.sock"), Listen("127.0.0.1:0")):
                with pytest.raises(forward.ForwardRefused) as caught:
                    await ask(there.session, wanted)
                assert caught.value.code == forward.Code.NOT_ALLOWED


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.com:0", "/run/x.sock"])
async def test_a_server_listens_on_loopback_only(bind: str) -> None:
    async with pair(URL, listen=["*", "*:*"]) as there:
        with pytest.raises(forward.ForwardRefused) as caught:
            async with forward.open_remote(there.session, bind, "9"):
                pass
    assert caught.value.code == forward.Code.NOT_ALLOWED


async def test_an_address_in_use_is_told_and_so_is_a_request_that_cannot_be_read() -> None:
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(URL, listen=["*"]) as there:
            with pytest.raises(forward.ForwardRefused, match="in use") as caught:
                async with forward.open_remote(there.session, str(port), "9"):
                    pass
            assert caught.value.code == forward.Code.IN_USE
            for opening in (
                b"",
                b"{",
                b'{"do":"format"}',
                b'{"do":"connect"}',
                b'{"do":"connect","target":"/a/../b"}',
                b"x" * 5000,
            ):
                channel = await there.session.open(forward.NAME, payload=opening)
                assert b'"code":400' in await channel.receive()
                await channel.aclose()


async def test_a_client_has_so_many_connections_and_listeners_and_no_more() -> None:
    limits = forward.ForwardLimits(connections=3, listeners=2)
    with trio.fail_after(PATIENCE):
        async with target() as port, pair(URL, [str(port)], listen=["*"], limits=limits) as there:
            held = [(await ask(there.session, Connect(str(port))))[0] for _ in range(3)]
            with pytest.raises(forward.ForwardRefused, match="3 connections") as caught:
                await ask(there.session, Connect(str(port)))
            assert caught.value.code == forward.Code.TOO_MANY
            held += [(await ask(there.session, Listen("0")))[0] for _ in range(2)]
            with pytest.raises(forward.ForwardRefused, match="2 listeners"):
                await ask(there.session, Listen("0"))
            for channel in held:
                channel.abort()
            while there.handler.stats().connections or there.handler.listeners:
                await trio.testing.wait_all_tasks_blocked()
            await ask(there.session, Connect(str(port)))


async def test_a_client_that_asks_again_and_again_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    caplog.set_level("INFO", "muxkit.forward")

    async def ask_for_it() -> None:
        with pytest.raises(forward.ForwardRefused):
            await ask(there.session, Connect("127.0.0.1:9"))

    async with pair(URL) as there:
        for _ in range(4 * LOGGED_MOST):
            await ask_for_it()
        refused = [record for record in caplog.records if getattr(record, "event", "") == "refused"]
        assert len(refused) == LOGGED_MOST
        await trio.sleep(2 * LOGGED_EVERY)
        await ask_for_it()
        assert f"{3 * LOGGED_MOST} more refusals" in caplog.text
        assert there.handler.stats().refused == 4 * LOGGED_MOST + 1


async def test_listeners_that_are_asked_for_at_once_are_counted_at_once() -> None:
    limits = forward.ForwardLimits(listeners=2)
    granted: list[str] = []
    refused: list[int] = []
    with trio.fail_after(PATIENCE):
        async with pair(URL, listen=["*"], limits=limits) as there:

            async def listen() -> None:
                try:
                    granted.append((await ask(there.session, Listen("0")))[1].address)
                except forward.ForwardRefused as error:
                    refused.append(error.code)

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(listen)
            assert (len(granted), len(there.handler.listeners)) == (2, 2)
            assert refused == [forward.Code.TOO_MANY] * 18


async def test_a_connection_of_another_client_cannot_be_taken() -> None:
    limits = forward.ForwardLimits(pending=2)
    with trio.fail_after(PATIENCE):
        async with pair(URL, listen=["*"], limits=limits) as there:
            control, done = await ask(there.session, Listen("0"))
            async with await dial(done.address), pair(URL + "2") as other:
                assert b'"connection":1' in await control.receive()
                with pytest.raises(forward.ForwardRefused) as caught:
                    await ask(other.session, Take(done.listener, 1))
                assert caught.value.code == forward.Code.GONE
            control.abort()
            await until_refused(done.address)


async def test_a_connection_that_no_client_takes_is_reset() -> None:
    limits = forward.ForwardLimits(take=0.05)
    with trio.fail_after(PATIENCE):
        async with pair(URL, listen=["*"], limits=limits) as there:
            _control, done = await ask(there.session, Listen("0"))
            async with await dial(done.address) as stream:
                with pytest.raises(trio.BrokenResourceError):
                    await read_all(stream)
            with pytest.raises(forward.ForwardRefused, match="ended"):
                await ask(there.session, Take(done.listener, 1))


async def test_a_channel_of_another_name_is_refused_with_a_reason() -> None:
    async with pair(URL) as there:
        channel = await there.session.open("chat", payload=encode(Connect("9")))
        with pytest.raises(trio.BrokenResourceError, match="only forwards"):
            await channel.receive()


async def test_the_handler_stands_beside_others() -> None:
    async def chat(channel: muxkit.Channel) -> None:
        await channel.send(b"hello")

    async with target(echo) as port:
        handler = muxkit.by_name({forward.NAME: forward.handler([str(port)]), "chat": chat})
        async with muxkit.open_server(handler, URL) as server, muxkit.connect(server.url) as session:
            assert await (await session.open("chat")).receive() == b"hello"
            await ask(session, Connect(str(port)))


async def test_what_a_server_says_is_escaped_before_it_gets_into_a_log() -> None:
    async def lie(channel: muxkit.Channel) -> None:
        await channel.send(b'{"answer":"refused","reason":"\\u001b[31mred\\n","code":403}')

    async with muxkit.open_server(lie, URL) as server, muxkit.connect(server.url) as session:
        with pytest.raises(forward.ForwardRefused) as caught:
            await ask(session, Connect("9"))
    assert caught.value.reason == r"\x1b[31mred\n"


async def test_what_a_client_asks_for_is_escaped_before_it_gets_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """The decoder's errors quote what they read, with the escape codes of terminals and line feeds."""
    caplog.set_level("INFO", "muxkit.forward")
    async with pair(URL) as there:
        channel = await there.session.open(NAME, payload=b'{"do":"\\u001b[31mred\\nrefused nobody"}')
        answer = await channel.receive()
        await channel.aclose()
    assert b"\\x1b[31mred" in answer
    (text,) = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "refused"]
    assert text.isprintable()


@pytest.mark.parametrize("answer", [b"", b"{", b'{"answer":"maybe"}', b"\xff", None])
async def test_an_answer_that_cannot_be_read_is_a_refusal(answer: bytes | None) -> None:
    async def babble(channel: muxkit.Channel) -> None:
        if answer is not None:
            await channel.send(answer)

    async with muxkit.open_server(babble, URL) as server, muxkit.connect(server.url) as session:
        with pytest.raises(forward.ForwardRefused):
            await ask(session, Connect("9"))
