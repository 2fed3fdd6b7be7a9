"""The rules for frames of channels: who may send which, and what each one does.

Each frame is checked completely before it is applied, so a frame that breaks a rule changes nothing. A half whose first
frame this is gets into the table only after the checks (`State.adopt`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from muxkit._errors import RemoteProtocolError
from muxkit.core import Cursor, NeedMore, StreamId
from muxkit.protocols.aqueduct import frames
from muxkit.protocols.aqueduct.events import Arrived, Attachment
from muxkit.protocols.aqueduct.frames import label
from muxkit.protocols.aqueduct.half import EngineHalf, Outcome
from muxkit.protocols.aqueduct.receive import DATAGRAM_COST, EngineReceiver
from muxkit.protocols.aqueduct.send import EngineSender
from muxkit.protocols.aqueduct.state import State

if TYPE_CHECKING:
    from muxkit.protocols.aqueduct.reader import IncomingStream

# The frames of a channel: the side that may send each, the rule that says so, and the one that wants it in a stream.
CHANNEL_FRAMES: Final[dict[type[object], tuple[str, str, str]]] = {
    frames.MessageFrame: ("sender", "aqueduct-T09", ""),
    frames.SentUnreliable: ("sender", "aqueduct-T18", "aqueduct-S09"),
    frames.FinishSender: ("sender", "aqueduct-T21", "aqueduct-S10"),
    frames.CancelSender: ("sender", "aqueduct-T23", "aqueduct-S13"),
    frames.AckReliable: ("receiver", "aqueduct-T25", "aqueduct-A01"),
    frames.AckNackUnreliable: ("receiver", "aqueduct-T29", "aqueduct-A08"),
    frames.CloseReceiver: ("receiver", "aqueduct-T35", "aqueduct-L11"),
    frames.ForgetChannel: ("creator", "aqueduct-T37", "aqueduct-L02"),
}


class Rules:
    """Checks and applies the frames that follow a ROUTE_TO."""

    def __init__(self, state: State) -> None:
        self._state = state

    # --- routing

    def check_unrouted(self, frame: object) -> None:
        """Raise `RemoteProtocolError` for a frame that needs a ROUTE_TO before it."""
        if type(frame) in CHANNEL_FRAMES:
            raise RemoteProtocolError(f"{type(frame).__name__} without a ROUTE_TO before it", rule="aqueduct-F05")

    def route(self, channel: int) -> tuple[bool, EngineHalf | None]:
        """Return whether the frames for a channel are to be parsed, and its half if there is one."""
        state = self._state
        half = state.table.get(channel)
        if half is not None:
            return True, half
        if channel in state.closing:
            return True, None  # FORGET_CHANNEL may follow
        if state.is_buried(channel):
            return False, None
        if frames.creator_of(channel) == state.role:
            state.forget_unknown(channel)
            return False, None
        return True, None

    def _half_of(self, channel: int) -> EngineHalf | None:
        """Return the half that a frame is for, or None if it has ended. A new one is not in the table yet."""
        state = self._state
        half = state.table.get(channel)
        if half is None and not (channel in state.closing or state.is_buried(channel)):
            state.check_room(1)
            half = state.make_theirs(channel)
        return half

    def _half_for(self, stream: IncomingStream) -> EngineHalf | None:
        if stream.half is None:
            stream.half = self._half_of(stream.channel)
        if stream.half is not None:
            self._state.confirm(stream.half)
        return stream.half

    def _check_direction(self, channel: int, frame: object) -> None:
        """Check the contextual rules of section 2.2, which need no state."""
        kind, role = type(frame), self._state.role
        if isinstance(frame, frames.RouteTo):
            raise RemoteProtocolError(f"ROUTE_TO after ROUTE_TO {channel}", rule="aqueduct-F03")
        if kind not in CHANNEL_FRAMES:
            raise RemoteProtocolError(f"{kind.__name__} after ROUTE_TO", rule="aqueduct-F04")
        allowed, rule, _ = CHANNEL_FRAMES[kind]
        if allowed == "creator":
            if frames.creator_of(channel) == role:
                raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} for a channel of ours", rule=rule)
            return
        side = "receiver" if frames.sender_of(channel) == role else "sender"
        if side != allowed:
            raise RemoteProtocolError(f"{label(channel)}: {kind.__name__} from the {side}", rule=rule)
        if isinstance(frame, frames.AckNackUnreliable) and frame.channel is not None:
            if frames.sender_of(frame.channel) != role:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel}, of which the peer is the sender", rule="aqueduct-T30"
                )
            if frame.channel != channel:
                raise RemoteProtocolError(
                    f"{label(channel)}: CHANNEL {frame.channel} after ROUTE_TO {channel}", rule="aqueduct-T28"
                )

    def _check_sequence(self, stream: IncomingStream, frame: object) -> None:
        self._check_direction(stream.channel, frame)
        if stream.last_word is not None and not isinstance(frame, frames.ForgetChannel):
            rule = "aqueduct-S12" if stream.last_word is frames.FinishSender else "aqueduct-S14"
            said = stream.last_word.__name__
            raise RemoteProtocolError(f"{label(stream.channel)}: {type(frame).__name__} after {said}", rule=rule)

    # --- frames in streams

    def take_plain_messages(
        self, receiver: EngineReceiver, stream: IncomingStream, data: bytes, position: int, end: int, most: int
    ) -> int:
        """Deliver up to `most` messages at `position` that are complete, in order, and have nothing but a payload.

        Nearly all messages are like this, so they have this fast path. Every other frame takes the way of `take_frame`
        or `take_message`, which also finds the violations.

        Returns:
            The position of the first frame that isn't such a message.
        """
        state, reliable = self._state, receiver.reliable
        if stream.last_word is not None or receiver.oneshot or reliable.total is not None or state.observer is not None:
            return position
        cursor, largest = Cursor(data, position, end), state.limits.message
        room = min(most, state.unread_limit.room(receiver))
        first = number = reliable.next_in_order
        messages: list[Arrived] = []
        total = 0
        while position < end and room > 0:
            start = frames.plain_start(number)
            if not data.startswith(start, position):
                break
            cursor.position = position + len(start)
            try:
                size = cursor.varint()
                payload = cursor.exact(size) if size <= largest else None
            except (NeedMore, RemoteProtocolError):
                break
            if payload is None:
                break
            after = cursor.position
            messages.append(Arrived(receiver, number, payload, (), (), after - position, 0, stream.id))
            total += size
            position = after
            number += 1
            room -= 1
        if messages:
            stream.frames += len(messages)
            reliable.arrived(first, number - 1)
            state.confirm(receiver)
            state.flush_soon(receiver)
            state.unread_limit.add(receiver, len(messages))
            receiver.deliver(messages, total)
        return position

    def take_message(self, frame: frames.MessageFrame, stream: IncomingStream, cost: int, loan: int) -> bool:
        """Deliver a MESSAGE that came in a stream; return False if its channel has ended."""
        if stream.last_word is not None or frames.sender_of(stream.channel) == self._state.role:
            self._check_sequence(stream, frame)
        half = self._half_for(stream)
        if type(half) is not EngineReceiver:
            return False
        half.check_message(frame.number, unreliable=False)
        if frame.attachments:
            self._check_attachments(half, frame)
            self._check_attached_once(frame)
        state = self._state
        state.adopt(half)
        half.reliable.arrived(frame.number, frame.number)
        state.flush_soon(half)
        state.unread_limit.add(half, 1)
        self._deliver(half, frame, cost, loan, stream.id)
        if half.is_complete:
            state.close(half, Outcome.FINISHED)
        return True

    def take_frame(self, frame: object, stream: IncomingStream) -> None:
        """Apply any other frame of a channel that came in a stream."""
        self._check_sequence(stream, frame)
        state = self._state
        if state.observer is not None:
            state.observer.frame("in", label(stream.channel), frames.name_of(frame), 0)
        if isinstance(frame, frames.ForgetChannel):
            if state.table.get(stream.channel) is not None:
                state.count_reset()
            state.forgotten(stream.channel)
            return
        half = self._half_for(stream)
        if type(half) is EngineReceiver:
            self._to_receiver(half, frame, stream)
        elif type(half) is EngineSender:
            self._to_sender(half, frame)

    def _to_receiver(self, receiver: EngineReceiver, frame: object, stream: IncomingStream) -> None:
        state, has_finished = self._state, receiver.reliable.total is not None
        match frame:
            case frames.SentUnreliable(count):
                if has_finished:
                    raise RemoteProtocolError("SENT_UNRELIABLE after FINISH_SENDER", rule="aqueduct-S12")
                receiver.check_counts(count, stream.id)
                state.adopt(receiver)
                due = receiver.count_sent(count, stream.id)
                if due is not None:
                    state.report_at(due, receiver)
            case frames.FinishSender(sent_reliable):
                receiver.check_finish(sent_reliable, stream.id)
                state.adopt(receiver)
                stream.last_word = frames.FinishSender
                receiver.reliable.total = sent_reliable
                if receiver.is_complete:
                    state.close(receiver, Outcome.FINISHED)
            case frames.CancelSender():
                if has_finished:
                    raise RemoteProtocolError("CANCEL_SENDER after FINISH_SENDER", rule="aqueduct-S12")
                state.count_reset()
                state.adopt(receiver)
                stream.last_word = frames.CancelSender
                state.close(receiver, Outcome.CANCELLED)

    def _to_sender(self, sender: EngineSender, frame: object) -> None:
        state = self._state
        match frame:
            case frames.AckReliable(ranges):
                if acked := sender.take_acked(ranges):
                    state.messages_acked(acked, sender.transit)
                sender.wake()
            case frames.AckNackUnreliable(ranges):
                acked, nacked = sender.take_reported(ranges)
                state.messages_acked(acked, sender.transit)
                state.nack(nacked)
                state.schedule_datagrams(sender)
                sender.wake()
            case frames.CloseReceiver():
                state.adopt(sender)
                state.end(sender, sender.outcome_of_close())

    # --- frames in datagrams

    def take_datagram_frame(self, frame: object, channel: int, size: int) -> bool:
        """Apply a frame after the ROUTE_TO of a datagram; return False if the rest is to be ignored."""
        self._check_direction(channel, frame)
        _, _, rule = CHANNEL_FRAMES[type(frame)]
        if rule:
            raise RemoteProtocolError(f"{type(frame).__name__} in a datagram", rule=rule)
        assert isinstance(frame, frames.MessageFrame)  # nothing else is left
        receiver = self._half_of(channel)
        if type(receiver) is not EngineReceiver:
            return False
        receiver.check_message(frame.number, unreliable=True)
        if frame.attachments:
            self._check_attachments(receiver, frame)
            if receiver.attached and receiver.unreliable.is_new(frame.number):  # not a copy of an earlier datagram
                self._check_attached_once(frame)
        state = self._state
        if channel not in state.table:
            state.adopt(receiver)
            state.add_stray(receiver)
        cost = size + DATAGRAM_COST
        is_beyond = receiver.reliable.total is not None and frame.number >= receiver.unreliable.known
        # A repeated datagram may bring back a channel that has long ended; its attachments must not come back as well.
        is_doubtful = bool(frame.attachments) and not receiver.attached
        if is_beyond or is_doubtful or not receiver.has_room(cost) or not receiver.unreliable.arrived(frame.number):
            state.dropped_datagrams += 1
            return True
        receiver.unread += cost
        state.unread_datagrams += cost
        self._deliver(receiver, frame, cost, 0, None)
        return True

    # --- messages

    def _check_attachments(self, receiver: EngineReceiver, frame: frames.MessageFrame) -> None:
        state, ids = self._state, [id for id, _ in frame.attachments]
        for id in ids:
            if id == frames.ENTRYPOINT:
                raise RemoteProtocolError("the entrypoint is attached", rule="aqueduct-T15")
            if frames.creator_of(id) == state.role:
                raise RemoteProtocolError(f"{label(id)} is attached by the other side", rule="aqueduct-T13")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError(f"a channel twice among {len(ids)} attachments", rule="aqueduct-T15")
        state.check_room(sum(map(state.is_new, [*ids, receiver.id or frames.ENTRYPOINT])))

    def _check_attached_once(self, frame: frames.MessageFrame) -> None:
        """Refuse a live channel that an earlier message has brought, as the original implementation does.

        The application has its half already, and a message without the channel would not be the one that was sent.
        """
        for id, _ in frame.attachments:
            if self._state.was_attached(id):
                raise RemoteProtocolError(
                    f"{label(id)} is attached to message {frame.number}, and an earlier message brought it: "
                    "a channel is attached to one message only",
                    rule="aqueduct-T15",
                )

    def _deliver(
        self, receiver: EngineReceiver, frame: frames.MessageFrame, cost: int, loan: int, stream: StreamId | None
    ) -> None:
        """Report a message as arrived, with those of its attachments that are new to the application."""
        state = self._state
        attached = []
        for id, headers in frame.attachments:
            half = state.attach(id, receiver.transit)
            if half is not None:
                attached.append(Attachment(half, headers))
        arrived = Arrived(receiver, frame.number, frame.payload, frame.headers, tuple(attached), cost, loan, stream)
        receiver.deliver([arrived], len(frame.payload))
        if state.observer is not None:
            state.observer.frame("in", label(receiver.id or frames.ENTRYPOINT), "MESSAGE", len(frame.payload))
