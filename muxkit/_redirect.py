"""Redirects: a server that shuts down tells its clients where to go, and clients decide whether to follow.

`Server.shutdown(redirect=url)` ends each session with the code 307 and a reason that ends with the URL. The reason is
plain text, so a client that doesn't know redirects sees an ordinary end of its session, and connects again to the URL
that it has. `muxkit.reconnecting` follows if the client allows it.

A server is trusted as far as it was authenticated, and even a trusted server may have been taken over. Following a
redirect sends the client's token to another place, and lets whoever is there answer. The rules are therefore strict
unless the program says otherwise:

- The URL must have the protocol and the transport of one of the client's own URLs. A redirect can't lead from TLS to
  plaintext, or to a Unix socket of the client's machine.
- Its host must be one of the hosts of the client's own URLs, or match `redirects=`.
- A redirect lasts as long as it works. When the client can't connect there, it returns to its own URLs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final
from urllib.parse import urlsplit

import attrs

from muxkit._plugins import SUFFIX, split_url
from muxkit.core import Reason
from muxkit.runtime import MOVED, AllAttemptsFailed, LinkLost, protect_package

ANYWHERE: Final = "*"
MAX_URL: Final = 1000  # characters; what a peer sends is not parsed beyond that


def moved_to(url: str) -> Reason:
    """Return the reason with which a server ends a session, and tells the client where to go."""
    return Reason(f"the server has moved to {url}", MOVED)


def redirected_by(error: Exception | None) -> str | None:
    """Return the URL that a server named when it ended the session, or None.

    If all attempts of a race have failed, the first server that named a URL counts.
    """
    if isinstance(error, AllAttemptsFailed):
        return next((url for _, each in error.attempts if (url := redirected_by(each)) is not None), None)
    if isinstance(error, LinkLost) and error.code == MOVED:
        url = (error.peer_reason or "").rpartition(" ")[2]
        return url if "://" in url and len(url) <= MAX_URL else None
    return None


def redirect_for(scheme: str, urls: Iterable[str]) -> str | None:
    """Return the URL for the clients of a server's URL: one of the same scheme, otherwise of the same protocol."""
    protocol = scheme.partition("+")[0]
    given = [*urls]
    same = [url for url in given if url.partition("://")[0] == scheme]
    return next(iter([*same, *(url for url in given if url.partition("+")[0] == protocol)]), None)


@attrs.frozen
class RedirectPolicy:
    """Which redirects a client follows."""

    urls: tuple[str, ...]
    """The client's own URLs."""
    hosts: Collection[str] = ()
    """Hosts that a redirect may lead to besides those of the client's URLs, as `redirects=` names them."""

    def objection(self, url: str) -> str | None:
        """Return why the client doesn't follow this redirect, or None if it does."""
        try:
            protocol, transport, address = split_url(url)
            found = {*_hosts(address)}
        except ValueError as error:
            return str(error)
        schemes = {each.partition("://")[0].removesuffix(SUFFIX) for each in self.urls}
        if f"{protocol}+{transport}".removesuffix(SUFFIX) not in schemes:
            return f"expected a URL of {' or '.join(sorted(schemes))}"
        own = {host for each in self.urls for host in _hosts(split_url(each)[2])}
        if ANYWHERE not in self.hosts:
            strange = sorted(host for host in found if host not in own and not self._allows(host))
            if strange or not found:
                where = strange[0] if strange else "an address without a host"
                return f"{where} isn't a host of this client's URLs; allow it with redirects=[{where!r}]"
        return None

    def _allows(self, host: str) -> bool:
        """Return True if `redirects=` names the host, or a domain with `*.` that it is below."""
        return any(
            host == each.lower() or (each.startswith("*.") and host.endswith(each[1:].lower())) for each in self.hosts
        )


def check_hosts(hosts: Collection[str]) -> None:
    """Raise for a value of `redirects=` that is no collection of hosts."""
    if isinstance(hosts, str):
        raise TypeError(f"redirects={hosts!r}: expected a list of hosts, such as ['*.example.org']")
    for each in hosts:
        if "/" in each or "*" in each.removeprefix("*.").removeprefix(ANYWHERE):
            raise ValueError(f"redirects=[{each!r}]: expected a host, a domain such as '*.example.org', or '*'")


def _hosts(address: str) -> Iterator[str]:
    """Iterate over the hosts of an address; there are none in that of a Unix socket."""
    for part in address.partition("/")[0].split(","):
        host = urlsplit(f"//{part.strip()}").hostname
        if host:
            yield host.lower()


protect_package(__name__)
