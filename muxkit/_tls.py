"""`TLS`, which contains the certificates and trust settings of one side, for all transports that encrypt."""

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
    """None if there is no certificate."""


@attrs.define
class TLS:
    """The certificates and trust settings of a client or a server.

    A server needs `cert` and `key`. A client needs nothing: it trusts the certificate authorities of the system.

    Files are in PEM format. `reload` reads them again, which affects new connections only.

    Raises:
        ValueError: If a file can't be read, or if the key doesn't belong to the certificate.
    """

    cert: File | None = None
    """The certificate that this side presents, followed by the certificates of its chain."""
    key: File | None = None
    """The key of the certificate. Leave it out if the file `cert` contains the key too."""
    ca: File | bytes | None = None
    """For clients: the certificates of the authorities to trust, instead of those of the system. Bytes are PEM text."""
    client_ca: File | bytes | None = None
    """For servers: accept only clients with a certificate from these authorities. Bytes are PEM text."""
    password: str | None = attrs.field(default=None, repr=False)
    """The password of the key, if it is encrypted."""
    verify: bool = True
    """False makes a client accept any server, so that anybody on the path can read and change everything. Use it only
    for tests."""
    generation: int = attrs.field(default=0, init=False, eq=False, repr=False)
    """How many times `reload` has read the files again. A transport with a cache compares this."""
    # One context for each list of protocols to negotiate (ALPN), because a context offers the same list to all of its
    # connections
    _contexts: dict[tuple[str, ...], _Contexts] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise ValueError(f"TLS(key={os.fspath(self.key)!r}): a key needs its certificate; pass cert= too")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("TLS(client_ca=…): only a server verifies clients; pass cert= and key= too")
        if self.ca is not None and not self.verify:
            raise ValueError("TLS(ca=…, verify=False): ca has no effect with verify=False; leave one of them out")
        self._contexts[()] = self._load(())

    def reload(self) -> None:
        """Read the files again, for new connections. If they are invalid, raise `ValueError` and keep the old ones."""
        self._contexts = {alpn: self._load(alpn) for alpn in self._contexts}
        self.generation += 1

    def client_context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for a new connection of a client. `alpn` are the protocols to negotiate."""
        return self._for(alpn).client

    def server_context(self, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context for a new connection of a server. Raises `ValueError` if there is no certificate."""
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
            raise ValueError(f"TLS({what}={shown}): expected certificates in PEM, found none") from error

    def _show(self, context: ssl.SSLContext, alpn: tuple[str, ...]) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if alpn:
            context.set_alpn_protocols(alpn)
        if self.cert is None:
            return
        cert = _readable("cert", self.cert)
        key = cert if self.key is None else _readable("key", self.key)
        try:
            # If there were no password here, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(cert, key, self.password or _no_password)
        except (ssl.SSLError, _PasswordNeeded) as error:
            files = f"cert={cert!r}" if self.key is None else f"cert={cert!r}, key={key!r}"
            raise ValueError(f"TLS({files}): {self._problem(error)}") from error

    def _problem(self, error: Exception) -> str:
        if isinstance(error, _PasswordNeeded):
            return "the key is encrypted; pass password= too"
        reason = getattr(error, "reason", None) or ""
        if "MISMATCH" in reason:
            return "the key doesn't belong to the certificate"
        # OpenSSL gives no reason if decryption works but the result isn't a key.
        if self.password and (not reason or "DECRYPT" in reason):
            return "the password of the key is wrong"
        why = f" ({reason.replace('_', ' ').lower()})" if reason else ""
        return f"expected a certificate and its key in PEM, found none{why}"


class _PasswordNeeded(Exception):
    pass


def _no_password() -> str:
    raise _PasswordNeeded
