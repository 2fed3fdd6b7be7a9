"""How is an address written? `host:port`, brackets around an IPv6 host, commas between several."""

from __future__ import annotations

FORM = "expected host:port, such as 127.0.0.1:7000, [::1]:7000 or localhost:7000"


def parse_host_port(address: str, *, default_port: int | None = None, form: str = FORM) -> tuple[str, int]:
    """Take `host:port` apart; raises ValueError that says what was expected."""
    host, bracket, rest = address.partition("]")
    if bracket:
        host, colon, digits = host.removeprefix("["), rest[:1], rest[1:]
        if not address.startswith("[") or ":" not in host or colon not in ("", ":"):
            raise ValueError(f"address {address!r}: {form}")
    else:
        host, colon, digits = address.rpartition(":") if ":" in address else (address, "", "")
        if ":" in host:
            raise ValueError(f"address {address!r}: an IPv6 host needs brackets; {form}")
    if not host or set(host) & set("/?#@[] ") or (bool(colon) != bool(digits)):
        raise ValueError(f"address {address!r}: {form}")
    if not colon and default_port is not None:
        return host, default_port
    if not (digits.isascii() and digits.isdigit() and int(digits) <= 65_535):
        raise ValueError(f"address {address!r}: the port must be a number up to 65535; {form}")
    return host, int(digits)


def parse_hosts(address: str) -> list[tuple[str, int]]:
    """One or more `host:port`, separated by commas; to be tried in that order."""
    return [parse_host_port(part.strip()) for part in address.split(",")]


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets where they are needed."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
