"""What an acknowledgement of the peer stands for, found out before anything is changed by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.relink._packets import Ack, Operation
from muxkit.protocols.relink._sequences import advance, resolve

if TYPE_CHECKING:
    from muxkit.protocols.relink._outgoing import Outgoing


def meant(outgoing: Outgoing, ack: Ack, sequence: int | None, count: int) -> int | None:
    """The number that an ack stands for; None if it says nothing new, as may happen while the peer resumes."""
    link = outgoing.link
    what = f"{ack.name.lower()} on channel {outgoing.channel}"
    if ack is Ack.RECEIVED or ack is Ack.CONSUMED:
        done = outgoing.received_told if ack is Ack.RECEIVED else outgoing.consumed_told
        if sequence is None:
            return advance(what, count, done=done, last=outgoing.sent)
        number = resolve(what, sequence, done=done, last=outgoing.sent)
        if ack is Ack.RECEIVED and number is not None and not outgoing.free and number < outgoing.received:
            known = f"{outgoing.received} was acknowledged before"
            raise RemoteProtocolError(f"{what}: {number}, though {known}", rule="relink-R03")
        return number
    if not link.out_transactions:
        raise RemoteProtocolError(f"{what}, which has no transactions", rule="relink-T06")
    if sequence is None:
        number = advance(what, count, done=outgoing.answered, last=outgoing.told)
    else:
        behind = link.config.window if link.is_resuming else 0
        found = resolve(what, sequence, done=outgoing.answered, last=outgoing.told, behind=behind)
        if found is None:
            return None
        number = found
        if number == outgoing.answered:
            if link.is_resuming or ack is outgoing.last_answer:
                return None
            raise RemoteProtocolError(f"{what}: {sequence} was answered otherwise before", rule="relink-Q11")
    run = next(run for run in outgoing.journal if run.through >= number)
    if run.operation is not Operation.COMMIT:
        rule = "relink-T04" if sequence is None else "relink-T03"
        raise RemoteProtocolError(f"{what}: message {number} was rolled back", rule=rule)
    return number


def is_end(outgoing: Outgoing) -> bool:
    """Whether a `closed` ends the channel; it says nothing if the peer, while it resumes, repeats an earlier end."""
    what = f"closed on channel {outgoing.channel}"
    if not outgoing.close_told:
        if outgoing.link.is_resuming and not outgoing.heard:
            return False
        raise RemoteProtocolError(f"{what}, which was not closed", rule="relink-K02")
    unanswered = any(run.operation is Operation.COMMIT for run in outgoing.journal)
    if outgoing.unsent or unanswered:
        open_ends = f"{len(outgoing.unsent)} messages not received, {outgoing.decided - outgoing.answered} not answered"
        raise RemoteProtocolError(f"{what}: {open_ends}", rule="relink-K02")
    return True
