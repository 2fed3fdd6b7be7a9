"""Certificates and trust of one side, in one object for every transport that encrypts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

import attrs

File = str | os.PathLike[str]


def _readable(what: str, path: File) -> str:
    try:
        with Path(path).open("rb"):
            return os.fspath(path)
    except OSError as error:
        raise ValueError(f"TLS({what}={os.fspath(path)!r}): {os.strerror(error.errno or 0).lower()}") from error


@attrs.frozen
class _Contexts:
    client: ssl.SSLContext
    server: ssl.SSLContext | None
    """None without a certificate."""


@attrs.define
class TLS:
    """What one side shows and whom it trusts; a connection that goes on keeps what it began with.

    A server needs `cert` and `key`. With `client_ca` it accepts only clients that show a certificate of these
    authorities. A client trusts the authorities of the system, or only those in `ca`, and shows `cert` if it is given.
    Files are PEM; `ca` and `client_ca` may be PEM text as bytes. The key may be in the file of the certificate.

    Raises ValueError for files that cannot be read or that do not fit together.
    """

    cert: File | None = None
    """The certificate and the chain behind it."""
    key: File | None = None
    ca: File | bytes | None = None
    client_ca: File | bytes | None = None
    password: str | None = attrs.field(default=None, repr=False)
    """Of the key."""
    verify: bool = True
    """False accepts any server, so anybody on the path can read and change everything; for tests."""
    generation: int = attrs.field(default=0, init=False, eq=False, repr=False)
    """How many times the files were read again; a transport that keeps what it made of them compares this."""
    _contexts: dict[tuple[str, ...], _Contexts] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """By the protocols to agree on, since a context offers the same to all of its connections."""

    def __attrs_post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ValueError(f"TLS(key={os.fspath(self.key)!r}): a key needs its certificate, cert=")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("TLS(client_ca=…): is for a server, which needs cert= and key=")
        if self.ca is not None and not self.verify:
            raise ValueError("TLS(ca=…, verify=False): what is not verified needs no authority")
        self._contexts[()] = self._load(())

    def reload(self) -> None:
        """Read the files again, for the handshakes from now on; if they are faulty, nothing changes."""
        self._contexts = {alpn: self._load(alpn) for alpn in self._contexts}
        self.generation += 1

    def client_context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for the next connection of a client; `alpn` are the protocols to agree on."""
        return self._for(alpn).client

    def server_context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for the next connection that a server accepts; raises ValueError without `cert`."""
        server = self._for(alpn).server
        if server is None:
            raise ValueError("a server needs its certificate and key: tls=muxkit.TLS(cert='cert.pem', key='key.pem')")
        return server

    def _for(self, alpn: Sequence[str]) -> _Contexts:
        found = self._contexts.get(tuple(alpn))
        if found is None:
            found = self._contexts[tuple(alpn)] = self._load(tuple(alpn))
        return found

    def _load(self, alpn: tuple[str, ...]) -> _Contexts:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.verify:
            client.check_hostname = False
            client.verify_mode = ssl.CERT_NONE
        elif self.ca is None:
            client.load_default_certs()
        else:
            self._trust(client, "ca", self.ca)
        self._show(client, alpn)
        if self.cert is None:
            return _Contexts(client, None)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.client_ca is not None:
            self._trust(server, "client_ca", self.client_ca)
            server.verify_mode = ssl.CERT_REQUIRED
        self._show(server, alpn)
        return _Contexts(client, server)

    def _trust(self, context: ssl.SSLContext, what: str, authorities: File | bytes) -> None:
        try:
            if isinstance(authorities, bytes):
                context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
            else:
                context.load_verify_locations(_readable(what, authorities))
        except ssl.SSLError as error:
            shown = "…" if isinstance(authorities, bytes) else repr(os.fspath(authorities))
            raise ValueError(f"TLS({what}={shown}): there is no certificate in PEM in it") from error

    def _show(self, context: ssl.SSLContext, alpn: tuple[str, ...]) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if alpn:
            context.set_alpn_protocols(alpn)
        if self.cert is None:
            return
        cert = _readable("cert", self.cert)
        key = cert if self.key is None else _readable("key", self.key)
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(cert, key, self.password or _no_password)
        except (ssl.SSLError, _PasswordNeeded) as error:
            files = f"cert={cert!r}" if self.key is None else f"cert={cert!r}, key={key!r}"
            raise ValueError(f"TLS({files}): {self._problem(error)}") from error

    def _problem(self, error: Exception) -> str:
        if isinstance(error, _PasswordNeeded):
            return "the key is encrypted: give its password="
        reason = getattr(error, "reason", None) or ""
        if "MISMATCH" in reason:
            return "the key does not belong to the certificate"
        # OpenSSL names no reason when what it decrypted is no key.
        if self.password and (not reason or "DECRYPT" in reason):
            return "the password of the key is wrong"
        return f"no certificate with its key in PEM ({(reason or type(error).__name__).replace('_', ' ').lower()})"


class _PasswordNeeded(Exception):
    pass


def _no_password() -> str:
    raise _PasswordNeeded
