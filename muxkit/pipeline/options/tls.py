"""How is a server reached over TLS? What a source and a sink both do with their options about it."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

from muxkit.pipeline.errors import OptionError

if TYPE_CHECKING:
    from muxkit.pipeline.options.source import Tls

ENCRYPTED: Final = frozenset({"tls", "wss"})


def link_options(url: str, tls: Tls) -> dict[str, Any]:
    """What the transport of that URL is to be given. Raises `OptionError` for what it cannot use."""
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
