"""TLS options, which the source and the sink share."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

import attrs

from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options.values import yes_or_no

if TYPE_CHECKING:
    from muxkit.pipeline.options.values import GivenOptions

ENCRYPTED: Final = frozenset({"tls", "wss"})
TLS_NAMES: Final = ("tlsCaFile", "tlsCertFile", "tlsKeyFile", "tlsServerHostname", "insecure")


@attrs.frozen(kw_only=True)
class Tls:
    """Files in PEM, which have to be on every machine that reads or writes."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_hostname: str | None = None
    insecure: bool = False

    @classmethod
    def parse(cls, given: GivenOptions) -> Tls:
        """Read the options in `TLS_NAMES`; raises `OptionError`."""
        tls = cls(
            ca_file=given.text("tlsCaFile"),
            cert_file=given.text("tlsCertFile"),
            key_file=given.text("tlsKeyFile"),
            server_hostname=given.text("tlsServerHostname"),
            insecure=given.read("insecure", yes_or_no, False),
        )
        if tls.key_file and not tls.cert_file:
            raise OptionError("tlsKeyFile", "a key without a certificate: tlsCertFile is missing")
        return tls


def link_options(url: str, tls: Tls) -> dict[str, Any]:
    """Make the options of the transport of a URL. Raises `OptionError` for one that it cannot use."""
    transport = url.partition("://")[0].rpartition("+")[2].lower()
    options: dict[str, Any] = {}
    if transport in ENCRYPTED:
        options["ssl_context"] = _context(tls)
        if tls.server_hostname is not None:
            if transport != "tls":
                raise OptionError("tlsServerHostname", f"{url}: only tls takes one")
            options["server_hostname"] = tls.server_hostname
    if tls.insecure and transport not in ("mem", "unix"):
        options["insecure"] = True
    return options


def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise OptionError("tlsCaFile", f"{tls.ca_file}: {error}") from error
    if tls.cert_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except OSError as error:
            raise OptionError("tlsCertFile", f"{tls.cert_file}: {error}") from error
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
