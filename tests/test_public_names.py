"""What completion shows on the objects that a program holds: only what its author calls."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Final

import pytest

import muxkit
from muxkit import forward
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream


def words(text: str) -> set[str]:
    return set(text.split())


CHANNEL: Final = words(
    "abort aclose as_stream close finish headers name opening receive receive_many send send_many session stats"
)
SESSION: Final = words("channels incoming info limits listener open ping request requests shutdown stats subscribe")
SENDING: Final = words(
    "abort aclose cancel_when_over close finish send send_many state wait_for_room wait_over waiting_since"
)
RECEIVING: Final = words("aclose close receive receive_many state unread")

# Beside these, each object has what its own protocol adds.
OBJECTS: Final[list[tuple[type, set[str], str]]] = [
    (muxkit.Channel, CHANNEL, ""),
    (muxkit.Session, SESSION, ""),
    (bpmux.Duplex, CHANNEL, "ping receiving sending sent_with_opening sink source"),
    (bpmux.Sink, SENDING, "give_credit half ping"),
    (bpmux.Source, RECEIVING, "abort end_payload give_credit half ping"),
    (bpmux.Request, set(), "abort aclose declined failed ping responded response"),
    (muxkit.IncomingRequest, set(), "abort cancelled decline payload respond session"),
    (bpmux.IncomingRequest, set(), "abort cancelled decline payload ping respond session"),
    (bpmux.Session, SESSION, "open_duplex open_request open_sink open_source receive send sinks sources"),
    (relink.Channel, CHANNEL, "common id ping receiving sending sent_with_opening"),
    (relink.Sender, SENDING, "channel commit half has_transactions is_closed ping rollback"),
    (relink.Receiver, RECEIVING, "channel committed consume half has_transactions process uncommitted"),
    (
        relink.Link,
        SESSION,
        "connected connections id is_connected multicast outage receiver receivers sender unanswered",
    ),
    (aqueduct.Channel, CHANNEL, "ping receiver receiving send_unreliable sender sending sent_with_opening"),
    (aqueduct.Sender, SENDING, "cancel half headers ping send_tracked"),
    (aqueduct.Receiver, RECEIVING, "abort half headers"),
    (aqueduct.Client, SESSION, "channel entrypoint peer_headers"),
    (aqueduct.Server, SESSION, "channel entrypoint peer_headers"),
    (
        e3x.Channel,
        CHANNEL,
        "delivered done dropped engine_channel id is_reliable ping post quota receiving sending sent_with_opening type",
    ),
    (e3x.Session, SESSION, "packet_limit"),
    (
        restream.Reader,
        set(),
        "acknowledge acknowledged aclose connections fail_after is_connected last_id outage receive snapshot uuid",
    ),
    (restream.Served, set(), "connections is_draining shutdown url urls"),
    (muxkit.Server, set(), "is_draining observer reload sessions shutdown url urls wait_closed"),
    (muxkit.SessionInfo, set(), "identity local peer protocol request transport user"),
    (muxkit.Identity, set(), "certificate gid names pid subject uid user"),
    (muxkit.Request, set(), "headers path query subprotocol"),
    (forward.Forward, set(), "address addresses shutdown stats"),
    (forward.RemoteForward, set(), "address addresses listening shutdown stats"),
]
NAMES: Final = [f"{kind.__module__}.{kind.__name__}" for kind, _, _ in OBJECTS]


def assigned(kind: type) -> set[str]:
    """Attributes that methods of the class and its bases set on `self`, which `dir()` of a class does not show."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("muxkit"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            names |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return names


@pytest.mark.parametrize(("kind", "common", "own"), OBJECTS, ids=NAMES)
def test_completion_shows_only_what_users_call(kind: type, common: set[str], own: str) -> None:
    """Was: `bpmux.Sink` showed 31 names, most of them the plumbing between a half and its session."""
    shown = {name for name in {*dir(kind), *assigned(kind)} if not name.startswith("_")}
    assert shown == common | words(own)


@pytest.mark.parametrize("kind", [each[0] for each in OBJECTS], ids=NAMES)
def test_each_name_that_is_shown_says_what_it_does(kind: type) -> None:
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert any(inspect.getdoc(getattr(base, name, None)) for base in kind.__mro__), name
