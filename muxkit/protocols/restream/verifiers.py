"""Is what came what was sent? A client's side of an application: pure functions over what has been received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit.protocols.restream.crc import roll
from muxkit.protocols.restream.twister import U32_MAX
from muxkit.protocols.restream.wire.messages import shown

if TYPE_CHECKING:
    from muxkit.protocols.restream.wire.json import Json


class Verifier(Protocol):
    """What a client makes sure of. The check is anything that JSON can say: it is saved with the client's state."""

    def begin(self) -> Json:
        """The check before the first message."""

    def resume(self, saved: Json) -> Json:
        """A check that came back from where it was saved; raises `LocalProtocolError` for what can be none."""

    def follow(self, check: Json, data: Json) -> Json:
        """The check after one message more; raises `RemoteProtocolError` if it cannot be right."""

    def is_final(self, data: Json) -> bool:
        """Is this the data of the final message?"""


class NumbersVerifier:
    """For the document's application: 32-bit numbers, and at the end the CRC of all of them, and their count."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count

    def begin(self) -> Json:
        return (0, 0)

    def resume(self, saved: Json) -> Json:
        if isinstance(saved, Sequence) and len(saved) == 2:
            so_far, rolled = saved
            if type(so_far) is int and type(rolled) is int and so_far > 0 and 0 <= rolled <= U32_MAX:
                return so_far, rolled
        raise LocalProtocolError("the saved state of this stream holds no count and CRC")

    def follow(self, check: Json, data: Json) -> Json:
        so_far, rolled = cast("tuple[int, int]", check)  # it was made by one of the methods here
        if type(data) is not dict:
            raise RemoteProtocolError("data has to be an object", rule="restream-S07")
        value = _u32(data.get("value"), "data.value", "restream-S07")
        so_far, rolled = so_far + 1, roll(rolled, value)
        if "crc" in data:
            crc = _u32(data["crc"], "data.crc", "restream-S12")
            if crc != rolled:
                raise RemoteProtocolError(
                    f"the numbers have the CRC {rolled}, the server says {crc}", rule="restream-S15"
                )
            if self._count is not None and so_far != self._count:
                raise RemoteProtocolError(
                    f"the stream ended after {so_far} numbers, {self._count} were asked for", rule="restream-S14"
                )
        elif self._count is not None and so_far >= self._count:
            raise RemoteProtocolError(
                f"{so_far} numbers without an end, {self._count} were asked for", rule="restream-S06"
            )
        return so_far, rolled

    def is_final(self, data: Json) -> bool:
        return isinstance(data, Mapping) and "crc" in data


class Unverified:
    """Takes any data. `final_key` is the key that the final data has, None where there is no final message."""

    def __init__(self, final_key: str | None = None) -> None:
        self._final_key = final_key

    def begin(self) -> Json:
        return None

    def resume(self, saved: Json) -> Json:
        return None

    def follow(self, check: Json, data: Json) -> Json:
        return None

    def is_final(self, data: Json) -> bool:
        return self._final_key is not None and isinstance(data, Mapping) and self._final_key in data


def _u32(value: Json, name: str, rule: str) -> int:
    if type(value) is not int:
        raise RemoteProtocolError(f"{name} has to be an integer", rule=rule)
    if not 0 <= value <= U32_MAX:
        raise RemoteProtocolError(f"{name} {shown(value)} is not within 0 and {U32_MAX}", rule=rule)
    return value
