"""`muxkit doctor`: which plugins are installed and work, and at which step connecting to a URL fails."""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import click
import trio

import muxkit
from muxkit._door import Door
from muxkit._plugins import PROTOCOLS, STREAMS, Plugin, installed, load, load_transport
from muxkit.cli.commands import build
from muxkit.cli.common import UNAUTHORISED, LinkOptions, one_url_options, run
from muxkit.cli.serve import send_back
from muxkit.cli.terminal import CommandFailed, Exit, in_options, printable, say, why_not
from muxkit.protocols import restream
from muxkit.runtime import HandshakeFailed, leaves_of, looks_like
from muxkit.runtime.pumps.quota import cpu_quota
from muxkit.runtime.pumps.turns import SPIN, usual_spin
from muxkit.testing import SimNetwork
from muxkit_adapters.proxy import Proxy, proxy_for

TEST_SECONDS: Final = 20.0  # for one protocol over one transport
STEP_SECONDS: Final = 10.0
REFUSAL_SECONDS: Final = 1.5  # a server that lets a client not in has said so by then
MESSAGES: Final = 10
HEAD_MOST: Final = 16_384  # bytes of the answer to an upgrade

LOOPBACK: Final = dict.fromkeys(("tcp", "tls", "ws", "wss", "quic", "udp", "dtls"), "127.0.0.1:0")
CERTIFIED: Final = frozenset({"tls", "wss", "quic", "dtls"})
ENCRYPTED: Final = frozenset({"tls", "wss"})
PACKETS: Final = frozenset({"udp", "dtls", "quic"})
DEFAULT_PORTS: Final = {"ws": 80, "wss": 443}
_WEBSOCKET_ID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_WORDS: Final = {True: "ok", False: "FAILED", None: "-"}


@attrs.frozen
class Result:
    """One line of a report."""

    step: str
    ok: bool | None
    """None: it was not tried."""
    text: str
    seconds: float | None = None

    def say(self, event: str, *, as_json: bool) -> None:
        took = "" if self.seconds is None else f"  ({self.seconds * 1000:.1f} ms)"
        fields = {"event": event, "name": self.step, "ok": self.ok, "text": self.text, "seconds": self.seconds}
        say(f"{_WORDS[self.ok]:7} {self.step:16} {self.text}{took}", fields, as_json=as_json)


@click.command()
@click.argument("url", required=False)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 1e6),
    default=STEP_SECONDS,
    show_default=True,
    help="Seconds for each step of a connection.",
)
@one_url_options
def doctor(link: LinkOptions, url: str | None, timeout: float) -> int:
    """Check the installed protocols and transports, or find the step at which connecting to URL fails.

    Without URL, it tries each protocol over each transport within this process. With URL, it tries the steps url, name
    and tcp (or proxy instead), tls, websocket, protocol and authorisation, as far as the transport has them, and stops
    at the first one that fails.

    Exit codes: 0 everything works, 1 a self-test failed, 2 the URL is invalid, 3 the server can't be reached or rejects
    this client, 4 it speaks another protocol.
    """
    if url is None:
        if not all([_installation(link.as_json), run(_self_test, link.as_json)]):
            raise CommandFailed("some installed plugins don't work")
        return Exit.OK
    code: int = run(_check, url, link, timeout)
    return code


# ---------------------------------------------------------------------------- this machine


def _installation(as_json: bool) -> bool:
    python = f"{platform.python_version()} at {sys.executable}"
    Result("python", True, f"{python}, {platform.platform()}").say("installed", as_json=as_json)
    Result("muxkit", True, f"{muxkit.__version__}, {build()}").say("installed", as_json=as_json)
    Result("spin", None if usual_spin() == 0 else True, _spin()).say("installed", as_json=as_json)
    for extra, names in sorted(_requirements().items()):
        found = {name: _version(name) for name in sorted(names)}
        missing = [name for name, number in found.items() if number is None]
        have = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
        what = extra or "required"
        text = f"needs {', '.join(missing)}: pip install 'muxkit[{extra}]'" if missing else have
        Result(what, None if missing else True, text).say("installed", as_json=as_json)
    plugins = installed()
    for plugin in plugins:
        if plugin.problem is not None:
            text = f"{plugin.kind} of {plugin.package}: {plugin.problem}"
            Result(plugin.name, None if plugin.extra else False, text).say("installed", as_json=as_json)
    return all(plugin.problem is None or plugin.extra for plugin in plugins)


def _spin() -> str:
    """Describe how long readers poll before they sleep, and why."""
    quota, seconds = cpu_quota(), usual_spin()
    if quota is not None and seconds == 0:
        return f"off: a cgroup limits this process to {quota:g} CPUs; {SPIN}=200 turns it on"
    limited = "" if quota is None else f", although a cgroup limits this process to {quota:g} CPUs"
    return f"readers spin for up to {seconds * 1e6:g} µs before they sleep{limited} ({SPIN})"


def _requirements() -> dict[str, set[str]]:
    """Return the packages of each extra. The key "" has those that are always needed."""
    found: dict[str, set[str]] = {}
    for text in requires("muxkit") or []:
        name = re.match(r"[\w.-]+", text)
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", text)
        if name is not None and (extra is None or extra[1] != "all"):
            found.setdefault("" if extra is None else extra[1], set()).add(name[0])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


async def _self_test(as_json: bool) -> bool:
    """Try each protocol over each transport that can carry it. Return False if one fails."""
    usable = [plugin for plugin in installed() if plugin.problem is None]
    protocols = [plugin for plugin in usable if plugin.kind == "protocol"]
    transports = [plugin for plugin in usable if plugin.kind == "transport"]
    ok = True
    with tempfile.TemporaryDirectory(prefix="muxkit-") as name:
        folder = Path(name)
        try:
            make_certificate(folder / "cert.pem", folder / "key.pem")
            tls = muxkit.TLS(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "cert.pem")
            without = ""
        except CommandFailed as error:
            tls, without = None, error.sentence
        for protocol in protocols:
            for transport in transports:
                if transport.name not in WITHOUT_CLIENTS and _carries(protocol, transport):
                    result = await _try(protocol.name, transport.name, folder, tls, without)
                    result.say("tested", as_json=as_json)
                    ok = ok and result.ok is not False
    return ok


WITHOUT_CLIENTS = {"asgi"}  # transports that only serve


def _carries(protocol: Plugin, transport: Plugin) -> bool:
    try:
        load_transport(transport.name, protocol.name, getattr(load(PROTOCOLS, protocol.name), "links", STREAMS))
    except muxkit.PluginError:
        return False
    return True


async def _try(protocol: str, transport: str, folder: Path, tls: muxkit.TLS | None, without: str) -> Result:
    """Send messages within this process through a real transport."""
    name = f"{protocol}+{transport}"
    address = {"unix": str(folder / protocol), "mem": f"doctor-{protocol}", "sim": "doctor"} | LOOPBACK
    if transport not in address:
        return Result(name, None, "not tried: only its package knows its addresses")
    if transport in CERTIFIED and tls is None:
        return Result(name, None, f"not tried: {without}")
    options: dict[str, Any] = {"tls": tls} if transport in CERTIFIED else {}
    url = f"{name}://{address[transport]}"
    began = trio.current_time()
    try:
        with trio.fail_after(TEST_SECONDS), SimNetwork() if transport == "sim" else nullcontext():
            text = await (_try_restream if protocol == "restream" else _try_channel)(url, options)
    except Exception as error:
        texts = ", ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves_of(error))
        return Result(name, False, in_options(texts))
    return Result(name, True, text, trio.current_time() - began)


async def _try_channel(url: str, options: dict[str, Any]) -> str:
    async with muxkit.open_server(muxkit.each_channel(send_back), url, linger=1.0, **options) as server:
        async with muxkit.connect(server.url, linger=1.0, **options) as session, session.open("doctor") as channel:
            for number in range(MESSAGES):
                message = b"%d" % number * 100
                await channel.send(message)
                if await channel.receive() != message:
                    raise CommandFailed("a message was changed on the way")
    return f"{MESSAGES} messages there and back"


async def _try_restream(url: str, options: dict[str, Any]) -> str:
    # Its own functions take contexts.
    if (tls := options.pop("tls", None)) is not None:
        serving, connecting = {"ssl_context": tls.server_context()}, {"ssl_context": tls.client_context()}
    else:
        serving, connecting = {}, {}
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(partial(restream.serve, url, store, **serving))
        async with restream.numbers(served.url, count=MESSAGES, **connecting) as numbers:
            received = [number async for number in numbers]
        nursery.cancel_scope.cancel()
    return f"{len(received)} messages, checked"


def make_certificate(certificate: Path, key: Path) -> None:
    """Create a certificate for 127.0.0.1, valid for a day. Raises `CommandFailed` if `openssl` isn't installed."""
    program = shutil.which("openssl")
    if program is None:
        raise CommandFailed("needs the program openssl to create a certificate")
    made = subprocess.run(
        [
            *(program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise CommandFailed(f"openssl failed to create a certificate: {made.stderr.strip().splitlines()[-1:]}")


# ---------------------------------------------------------------------------- a URL


class StepFailed(Exception):
    """A step of a check failed: its name, a description, and the exit code of the command."""

    def __init__(self, step: str, text: str, exit: Exit = Exit.NOT_CONNECTED) -> None:
        super().__init__(text)
        self.step = step
        self.exit = exit


async def _check(url: str, link: LinkOptions, within: float) -> int:
    """Check a URL, print a line for each step, and return the exit code."""
    failed: StepFailed | None = None
    try:
        await _Check(url, link, within).run()
    except StepFailed as error:
        failed = error
        Result(error.step, False, in_options(str(error))).say("step", as_json=link.as_json)
    fields = {
        "event": "result",
        "ok": failed is None,
        "failed": None if failed is None else failed.step,
        "exit": int(Exit.OK if failed is None else failed.exit),
    }
    if link.as_json or failed is None:
        say(f"{url}: all is well", fields, as_json=link.as_json)
    return Exit.OK if failed is None else failed.exit


class _Check:
    """The steps from a URL to an open session."""

    def __init__(self, url: str, link: LinkOptions, within: float) -> None:
        self._url = url
        self._link = link
        self._within = within
        scheme, _, self._address = url.partition("://")
        self._protocol, _, self._transport = scheme.partition("+")
        self._host, self._port = "", 0
        self._proxy: Proxy | None = None

    async def run(self) -> None:
        await self._step("url", self._parse)
        if self._transport == "unix":
            await self._step("socket", self._connect_to_path)
        elif self._transport in LOOPBACK:
            if self._proxy is not None:
                await self._step("proxy", self._connect_through)
            else:
                await self._step("name", self._resolve)
                if self._transport not in PACKETS:
                    await self._step("tcp", self._connect)
            if self._transport in ENCRYPTED:
                await self._step("tls", self._shake_hands)
            if self._transport in ("ws", "wss"):
                await self._step("websocket", self._upgrade)
        if self._protocol == "restream":
            await self._step("protocol", self._speak_restream)
        else:
            await self._speak()

    async def _step(self, name: str, work: Callable[[], Awaitable[str]]) -> None:
        began = trio.current_time()
        try:
            with trio.fail_after(self._within):
                text = await work()
        except trio.TooSlowError:
            raise StepFailed(name, f"no answer within {self._within:g} s") from None
        Result(name, True, text, trio.current_time() - began).say("step", as_json=self._link.as_json)

    async def _parse(self) -> str:
        try:
            if self._protocol == "restream":
                load_transport(self._transport, "restream")
            else:
                Door(self._url, {"token": self._link.token()})
            if self._transport in LOOPBACK:
                first = self._address.split(",")[0]
                parts = urlsplit(f"//{first}")
                self._host = parts.hostname or ""
                self._port = parts.port or DEFAULT_PORTS.get(self._transport, 0)
                if not self._host or not self._port:
                    raise ValueError(f"{first!r} has no host and port")
                if self._transport not in PACKETS:  # the others have no such option, which opening the session says
                    self._proxy = proxy_for(self._link.proxy, self._host, self._port)
        except (ValueError, muxkit.PluginError, muxkit.Unsupported) as error:
            raise StepFailed("url", str(error), Exit.USAGE) from error
        await trio.lowlevel.checkpoint()
        return f"the protocol {self._protocol} over {self._transport}"

    async def _resolve(self) -> str:
        try:
            found = await trio.socket.getaddrinfo(self._host, self._port)
        except OSError as error:
            raise StepFailed("name", f"{self._host}: {error.strerror or error}") from error
        except UnicodeError as error:
            raise StepFailed("name", f"{self._host}: invalid host name") from error
        addresses = sorted({str(each[4][0]) for each in found})
        return f"{self._host} is {', '.join(addresses)}"

    async def _connect_to_path(self) -> str:
        path = self._address.split("#")[0]
        try:
            await (await trio.open_unix_socket(path)).aclose()
        except OSError as error:
            raise StepFailed("socket", f"{path}: {why_not(error)}") from error
        return f"{path} accepts"

    async def _dial(self, step: str) -> trio.SocketStream:
        if self._proxy is not None:
            return await self._tunnel(step, self._proxy)
        try:
            return await trio.open_tcp_stream(self._host, self._port)
        except OSError as error:
            raise StepFailed(step, f"{self._host}:{self._port}: {why_not(error)}") from error

    async def _tunnel(self, step: str, proxy: Proxy) -> trio.SocketStream:
        try:
            stream = await trio.open_tcp_stream(proxy.host, proxy.port)
        except OSError as error:
            raise StepFailed(step, f"the proxy {proxy}: {why_not(error)}") from error
        try:
            await proxy.open_tunnel(stream, f"{self._host}:{self._port}", self._host, self._port)
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, OSError):
                raise StepFailed(step, in_options(str(error))) from error
            raise
        return stream

    async def _connect_through(self) -> str:
        async with await self._dial("proxy"):
            return f"{self._proxy} opened a tunnel to {self._host} port {self._port}"

    async def _connect(self) -> str:
        async with await self._dial("tcp") as stream:
            return f"connected to {stream.socket.getpeername()[0]} port {self._port}"

    async def _encrypted(self, step: str) -> trio.SSLStream[trio.SocketStream]:
        tls = self._link.tls or muxkit.TLS(verify=not self._link.insecure)
        stream = trio.SSLStream(
            await self._dial(step), tls.client_context(), server_hostname=self._host, https_compatible=True
        )
        try:
            await stream.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError) as error:
            cause = error if isinstance(error, ssl.SSLError) else error.__cause__
            await trio.aclose_forcefully(stream)
            raise StepFailed(step, _why_not_encrypted(cause)) from error
        return stream

    async def _shake_hands(self) -> str:
        stream = await self._encrypted("tls")
        spoken = f"{stream.version()}, {(stream.cipher() or ('?',))[0]}"
        shown = dict(stream.getpeercert() or {})
        await trio.aclose_forcefully(stream)
        if not shown:
            return f"{spoken}; the certificate was not verified"
        names = ", ".join(str(name) for _, name in _pairs(shown.get("subjectAltName")))
        return f"{spoken}; a certificate for {names or 'no name'}, until {shown.get('notAfter')}"

    async def _upgrade(self) -> str:
        stream: trio.abc.Stream
        stream = await (self._encrypted if self._transport == "wss" else self._dial)("websocket")
        try:
            return await self._ask_for_upgrade(stream)
        except (trio.BrokenResourceError, ssl.SSLError) as error:
            raise StepFailed("websocket", "the server closed the connection without answering the upgrade") from error
        finally:
            await trio.aclose_forcefully(stream)

    async def _ask_for_upgrade(self, stream: trio.abc.Stream) -> str:
        rest = self._address[len(self._address.split("/")[0]) :].split("#")[0]
        key = base64.b64encode(secrets.token_bytes(16))
        host = self._address.split("/")[0].encode("idna" if self._address.isascii() else "utf-8")
        await stream.send_all(
            b"GET %s HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: %s\r\nSec-WebSocket-Version: 13\r\n\r\n" % ((rest or "/").encode(), host, key)
        )
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_MOST:
            data = await stream.receive_some(HEAD_MOST)
            head += bytes(data)
            if not data or not head.startswith(b"HTTP/"[: len(head)]):
                break
        if not head:
            raise StepFailed("websocket", "the server closed the connection without answering the upgrade")
        status = re.match(rb"HTTP/1\.\d (\d{3})([^\r\n]*)", head)
        if status is None:
            speaks = looks_like(head)
            told = f"; it looks like {speaks}" if speaks else ""
            raise StepFailed("websocket", f"the server doesn't speak HTTP{told}")
        if status[1] != b"101":
            with trio.move_on_after(REFUSAL_SECONDS):
                while len(head) < HEAD_MOST and (data := await stream.receive_some(HEAD_MOST)):
                    head += bytes(data)
            body = head.partition(b"\r\n\r\n")[2].strip().splitlines()[:1]
            said = f": {body[0].decode(errors='replace')[:200]}" if body else ""
            reason = (status[1] + status[2]).decode(errors="replace").strip()
            raise StepFailed("websocket", f"the server answers {reason} to {printable(rest or '/')}{said}")
        wanted = base64.b64encode(hashlib.sha1(key + _WEBSOCKET_ID, usedforsecurity=False).digest())
        accept = re.search(rb"\r\nsec-websocket-accept: *([^\r\n ]*)", head, re.IGNORECASE)
        if accept is None or accept[1] != wanted:
            raise StepFailed("websocket", "the server accepted the upgrade with a wrong Sec-WebSocket-Accept")
        return f"the server takes the upgrade at {printable(rest or '/')}"

    async def _speak_restream(self) -> str:
        options: dict[str, Any] = dict(self._link.link)
        if self._link.tls is not None:
            options["ssl_context"] = self._link.tls.client_context()
        try:
            await restream.status(self._url, restream.new_uuid(), **options)
        except restream.StreamRefused:
            pass  # which only a server of restream says
        except (OSError, muxkit.MuxError) as error:
            raise StepFailed("protocol", str(error), Exit.VIOLATION) from error
        return "the server answers"

    async def _speak(self) -> None:
        """Open a session, measure a round trip, and wait for a refusal, which some protocols deliver late."""
        link, began, stands = self._link, trio.current_time(), False
        within = self._within + REFUSAL_SECONDS
        try:
            with trio.fail_after(within):
                async with muxkit.connect(
                    self._url, tls=link.tls, token=link.token(), linger=1.0, **link.link
                ) as session:
                    text = await _round_trip(session)
                    took = trio.current_time() - began
                    stands = True
                    with trio.move_on_after(REFUSAL_SECONDS):
                        async for _ in session.incoming():
                            break
                        else:  # the server ends the session, and another call says why
                            await _round_trip(session)
            Result("protocol", True, text, took).say("step", as_json=link.as_json)
        except trio.TooSlowError:
            hint = "; relink can't report a refusal, so the server may want a token" * (self._protocol == "relink")
            text = f"no session within {within:g} s{hint}"
            raise StepFailed("protocol", text, Exit.VIOLATION) from None
        except muxkit.Refused as error:
            raise StepFailed("authorisation", str(error)) from error
        except HandshakeFailed as error:
            raise StepFailed("tls" if self._transport in PACKETS else "protocol", str(error)) from error
        except (OSError, muxkit.MuxError) as error:
            if isinstance(error, muxkit.LinkLost) and error.code == UNAUTHORISED:
                raise StepFailed("authorisation", error.peer_reason or str(error)) from error
            step = "authorisation" if stands else "protocol"
            raise StepFailed(step, str(error), Exit.NOT_CONNECTED if stands else Exit.VIOLATION) from error
        except ValueError as error:
            raise StepFailed("url", str(error), Exit.USAGE) from error
        how = "with a token" if link.token() else "without a token"
        Result("authorisation", True, f"the server accepts this client {how}").say("step", as_json=link.as_json)


async def _round_trip(session: muxkit.Session) -> str:
    try:
        return f"a round trip through the server's session took {await session.ping() * 1000:.1f} ms"
    except muxkit.Unsupported:
        return "the session has begun; this protocol has no ping"


def _why_not_encrypted(error: BaseException | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; --ca names the authorities to trust"
    reason = getattr(error, "reason", None) or ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "the server doesn't speak TLS at this port; try +tcp or +ws"
    return f"the handshake failed: {reason.replace('_', ' ').lower() or error or 'the server hung up'}"


def _pairs(value: object) -> list[tuple[str, object]]:
    return [tuple(each) for each in value] if isinstance(value, tuple) else []
