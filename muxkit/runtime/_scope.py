"""Who owns the tasks? A nursery for background work that adds no exception group to what its block raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit.runtime._interrupts import protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


@protected_manager
async def background() -> AsyncGenerator[trio.Nursery, None]:
    """A nursery whose tasks end with the block.

    Its tasks record what they expect to go wrong instead of raising it, so there is one error to tell: the
    block's own, as it was raised, even if it is a group that the block made. If a background task raises
    nevertheless, alone, that error comes out bare as well (a bug of ours); only several at once come as a group.
    An interrupt from the keyboard comes out bare wherever it struck.
    """
    own: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as raised:
                own = raised
                raise
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = _the_one(group, own)
        if error is None:
            raise
        # Set aside, or the group would come out as the context of its own member.
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context
            del error, context, group
    finally:
        del own


def _the_one(group: BaseExceptionGroup[BaseException], own: BaseException | None) -> BaseException | None:
    """What to raise instead of the group, if it holds one story only; `own` is what the block raised."""
    told = set() if own is None else {id(leaf) for leaf in _leaves(own)}
    strange = [leaf for leaf in _leaves(group) if id(leaf) not in told and not isinstance(leaf, trio.Cancelled)]
    if not strange:
        return own or next(_leaves(group))
    if len(strange) > 1:
        return None
    # An interrupt is what happened; that the block fell over it is not worth a group.
    is_the_reason = own is None or isinstance(own, trio.Cancelled) or not isinstance(strange[0], Exception)
    return strange[0] if is_the_reason else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error
