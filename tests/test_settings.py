"""A setting out of its range is refused with its name, its value and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muxkit.protocols import aqueduct, bpmux, e3x, relink, yamux
from muxkit.protocols.restream.client.driver import ClientPolicy

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("config", "setting", "says"),
    [
        (bpmux.Config, {"keepalive": 0}, r"Config\(keepalive=0\): expected a finite number above 0, or None"),
        (bpmux.Config, {"first_id": 0}, r"Config\(first_id=0\): expected a number from 1 to 18446744073709551615"),
        (yamux.Config, {"unacknowledged": 0.5}, r"Config\(unacknowledged=0.5\): expected a number of at least 1"),
        (yamux.Config, {"frame": 2**20 + 1}, r"Config\(frame=1048577\): expected a number from 1 to 1048576"),
        (yamux.Config, {"close_timeout": 0}, r"Config\(close_timeout=0\): expected a finite number above 0"),
        (relink.Config, {"window": 0}, r"Config\(window=0\): expected a number from 1 to 4294967295"),
        (e3x.Config, {"packet": 255}, r"Config\(packet=255\): expected a number from 256 to 65507"),
        (aqueduct.Config, {"gaps": 0}, r"Config\(gaps=0\): expected a finite number above 0"),
        (ClientPolicy, {"ahead": 0.5}, r"ClientPolicy\(ahead=0.5\): expected a number of at least 1"),
        (ClientPolicy, {"silence": float("inf")}, r"ClientPolicy\(silence=inf\): expected a finite number"),
    ],
)
def test_a_value_out_of_range_is_named(config: Callable[..., object], setting: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(**setting)


@pytest.mark.parametrize("config", [bpmux.Config, yamux.Config, relink.Config, e3x.Config])
def test_none_turns_keepalive_off(config: Callable[..., object]) -> None:
    config(keepalive=None)
