"""Ids that are free, channels that live, channels that ended."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._limits import Limits
from muxkit.core._channels import Census, ChannelTable, Ids

U64_MAX = 2**64 - 1
NONE: dict[int, str] = {}


def table_of(
    *, channels: int = 100, backlog: int = 100, tombstones: int = 100, ids: Ids | None = None
) -> ChannelTable[str]:
    limits = Limits(channels=channels, backlog=backlog, tombstones=tombstones)
    return ChannelTable(limits, ids or Ids(0, U64_MAX, wraps=True))


# Ids


def test_ids_count_up_from_the_first() -> None:
    ids = Ids(0, U64_MAX)
    assert [ids.allocate(NONE) for _ in range(3)] == [0, 1, 2]


def test_ids_keep_to_their_side_by_a_step() -> None:
    odd, even = Ids(1, 2**32 - 1, step=2), Ids(2, 2**32 - 1, step=2)
    assert [odd.allocate(NONE), odd.allocate(NONE), even.allocate(NONE), even.allocate(NONE)] == [1, 3, 2, 4]


def test_an_id_in_use_is_passed_over() -> None:
    assert Ids(0, U64_MAX).allocate({0: "", 1: "", 3: ""}) == 2


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("last", [0, 1, 2**7, 2**32 - 1, 2**62 - 1, 2**63, U64_MAX])
def test_the_last_id_is_given_and_nothing_above_it(last: int) -> None:
    ids = Ids(0, last, start=last)
    assert ids.allocate(NONE) == last
    with pytest.raises(LocalProtocolError, match=f"from 0 to {last} in steps of 1"):
        ids.allocate(NONE)


def test_a_step_that_does_not_meet_the_last_id_stops_below_it() -> None:
    ids = Ids(2, 2**32 - 1, step=2, start=2**32 - 2)
    assert ids.allocate(NONE) == 2**32 - 2
    with pytest.raises(LocalProtocolError):
        ids.allocate(NONE)


@pytest.mark.requirement("R-16")
@pytest.mark.parametrize("last", [1, 2**7, 2**32 - 1, 2**62 - 1, 2**63, U64_MAX])
def test_ids_that_wrap_start_over_behind_the_last_and_pass_over_live_ones(last: int) -> None:
    ids = Ids(0, last, start=last, wraps=True)
    assert ids.allocate(NONE) == last
    assert ids.allocate({0: ""}) == 1


def test_a_small_space_is_exhausted_when_all_of_its_ids_are_in_use() -> None:
    ids = Ids(1, 6, step=2, wraps=True)
    used: dict[int, str] = {}
    for _ in range(3):
        used[ids.allocate(used)] = ""
    assert set(used) == {1, 3, 5}
    with pytest.raises(
        LocalProtocolError, match="no free channel id: expected one from 1 to 6 in steps of 2, and 3 are in use"
    ):
        ids.allocate(used)
    del used[3]
    assert ids.allocate(used) == 3


def test_the_one_id_of_a_space_of_one_comes_again_once_it_is_free() -> None:
    ids = Ids(0, 0, wraps=True)
    assert ids.allocate(NONE) == 0
    with pytest.raises(LocalProtocolError):
        ids.allocate({0: ""})
    assert ids.allocate(NONE) == 0


class IdsAgainstASet(RuleBasedStateMachine):
    """An id is found whenever one is free, and it is free."""

    SPACE = frozenset({1, 4, 7, 10, 13})

    def __init__(self) -> None:
        super().__init__()
        self.ids = Ids(1, 14, step=3, start=10, wraps=True)
        self.used: dict[int, str] = {}

    @precondition(lambda self: len(self.used) < 5)
    @rule()
    def allocate(self) -> None:
        id = self.ids.allocate(self.used)
        assert id in self.SPACE - self.used.keys()
        self.used[id] = ""

    @precondition(lambda self: len(self.used) == 5)
    @rule()
    def find_none(self) -> None:
        with pytest.raises(LocalProtocolError):
            self.ids.allocate(self.used)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        del self.used[data.draw(st.sampled_from(sorted(self.used)))]


TestIdsAgainstASet = IdsAgainstASet.TestCase


# Live channels


def test_a_channel_is_found_by_its_id_until_it_is_removed() -> None:
    table = table_of()
    table.add_ours(7, "seven")
    assert table.get(7) == "seven"
    assert table.remove(7) == "seven"
    assert table.get(7) is None


def test_a_table_tells_its_channels_oldest_first() -> None:
    table = table_of()
    table.add_ours(9, "first")
    table.add_theirs(3, "second")
    assert list(table) == ["first", "second"]
    assert len(table) == 2
    assert 3 in table
    assert 4 not in table


def test_channels_may_be_removed_while_they_are_told() -> None:
    table = table_of()
    table.add_ours(0, "zero")
    table.add_theirs(1, "one")
    assert [table.remove(int(channel == "one")) for channel in table] == ["zero", "one"]
    assert len(table) == 0


def test_an_allocated_id_is_not_that_of_a_live_channel() -> None:
    table = table_of(ids=Ids(0, U64_MAX, start=U64_MAX, wraps=True))
    table.add_ours(U64_MAX, "ours")
    table.add_theirs(0, "theirs")
    assert table.allocate() == 1


def test_an_id_of_ours_cannot_be_used_twice_at_once() -> None:
    table = table_of()
    table.add_theirs(5, "first")
    with pytest.raises(LocalProtocolError, match="channel 5 is already open"):
        table.add_ours(5, "second")
    assert table.get(5) == "first"


def test_a_peer_who_opens_a_live_channel_breaks_the_protocol() -> None:
    table = table_of()
    table.add_ours(5, "first")
    with pytest.raises(RemoteProtocolError, match="peer opened channel 5, which is already open"):
        table.add_theirs(5, "second")
    assert (table.get(5), table.census.theirs, table.census.waiting) == ("first", 0, 0)


def test_a_channel_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(LocalProtocolError, match="channel 5 is not open"):
        table_of().remove(5)


# Limits


def test_one_channel_too_many_from_the_peer_names_the_limit_and_changes_nothing() -> None:
    table = table_of(channels=2)
    table.add_theirs(0, "a")
    table.add_theirs(1, "b")
    with pytest.raises(RemoteProtocolError, match="expected at most 2, the peer opened 3") as caught:
        table.add_theirs(2, "c")
    assert caught.value.limit == "channels"
    assert (list(table), table.census.theirs, table.census.waiting) == (["a", "b"], 2, 2)


def test_one_channel_too_many_of_ours_is_refused_with_the_numbers() -> None:
    table = table_of(channels=1)
    table.add_ours(0, "a")
    assert table.census.places == 0
    with pytest.raises(LocalProtocolError, match="expected at most 1, 1 are open"):
        table.add_ours(1, "b")
    assert list(table) == ["a"]


def test_the_channels_of_the_peer_take_no_room_from_ours() -> None:
    table = table_of(channels=1)
    table.add_theirs(0, "a")
    assert table.census.places == 1
    table.add_ours(1, "b")
    assert len(table) == 2


def test_a_removed_channel_makes_room_for_another() -> None:
    table = table_of(channels=1)
    table.add_theirs(0, "a")
    table.add_ours(1, "b")
    table.remove(0)
    table.remove(1)
    table.add_theirs(2, "c")
    table.add_ours(3, "d")
    assert list(table) == ["c", "d"]


def test_the_backlog_has_room_until_as_many_wait_as_the_limit_says() -> None:
    table = table_of(backlog=2)
    table.add_theirs(0, "a")
    assert table.census.has_backlog_room
    table.add_theirs(1, "b")
    assert not table.census.has_backlog_room


def test_a_channel_leaves_the_backlog_once_when_it_is_accepted() -> None:
    table = table_of()
    table.add_theirs(0, "a")
    table.add_theirs(1, "b")
    table.accept(0)
    table.accept(0)
    assert table.census.waiting == 1


def test_a_channel_that_ends_before_it_is_accepted_leaves_the_backlog() -> None:
    table = table_of()
    table.add_theirs(0, "a")
    table.remove(0)
    table.accept(0)
    assert table.census.waiting == 0


def test_accepting_a_channel_of_ours_changes_nothing() -> None:
    table = table_of()
    table.add_ours(0, "a")
    table.accept(0)
    assert table.census.waiting == 0


def test_tables_of_one_connection_count_together() -> None:
    limits = Limits(channels=2)
    census = Census(limits)
    sinks: ChannelTable[str] = ChannelTable(limits, Ids(0, U64_MAX), census)
    streams: ChannelTable[str] = ChannelTable(limits, Ids(0, U64_MAX), census)
    sinks.add_theirs(0, "a")
    streams.add_theirs(0, "b")
    with pytest.raises(RemoteProtocolError, match="at most 2, the peer opened 3"):
        sinks.add_theirs(1, "c")


class TableAgainstItsChannels(RuleBasedStateMachine):
    """The counts are always those of the channels in the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(channels=4, ids=Ids(0, 9, wraps=True))
        self.model: dict[int, tuple[bool, bool]] = {}  # id: ours? waiting?

    @rule()
    def open(self) -> None:
        id = self.table.allocate()
        if self.table.census.places:
            self.table.add_ours(id, str(id))
            self.model[id] = (True, False)

    @rule(id=st.integers(0, 9))
    def be_opened(self, id: int) -> None:
        if id in self.model or sum(not ours for ours, _ in self.model.values()) == 4:
            with pytest.raises(RemoteProtocolError):
                self.table.add_theirs(id, str(id))
        else:
            self.table.add_theirs(id, str(id))
            self.model[id] = (False, True)

    @rule(id=st.integers(0, 9))
    def accept(self, id: int) -> None:
        self.table.accept(id)
        if id in self.model:
            self.model[id] = (self.model[id][0], False)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))
        assert self.table.remove(id) == str(id)
        del self.model[id]

    @invariant()
    def counts_agree(self) -> None:
        census = self.table.census
        assert list(self.table) == [str(id) for id in self.model]
        assert census.ours == sum(ours for ours, _ in self.model.values())
        assert census.theirs == len(self.model) - census.ours
        assert census.waiting == sum(waiting for _, waiting in self.model.values())


TestTableAgainstItsChannels = TableAgainstItsChannels.TestCase


# Tombstones


def test_an_id_that_never_ended_is_not_buried() -> None:
    assert not table_of().is_buried(5, now=0.0)


def test_an_ended_channel_is_buried_for_as_long_as_said_and_no_longer() -> None:
    table = table_of()
    table.bury(5, now=10.0, keep=1.0)
    assert table.is_buried(5, now=10.999)
    assert not table.is_buried(5, now=11.0)
    assert not table.is_buried(5, now=10.5)  # once over, it is forgotten


def test_burying_again_begins_a_new_rest() -> None:
    table = table_of(tombstones=2)
    table.bury(5, now=0.0, keep=1.0)
    table.bury(6, now=0.5, keep=1.0)
    table.bury(5, now=0.9, keep=1.0)
    table.bury(7, now=0.9, keep=1.0)
    assert table.is_buried(5, now=1.5)
    assert not table.is_buried(6, now=0.9)  # the oldest by then, and one too many


def test_above_the_limit_the_oldest_tombstone_gives_way() -> None:
    table = table_of(tombstones=2)
    for id in range(3):
        table.bury(id, now=0.0, keep=1.0)
    assert [table.is_buried(id, now=0.0) for id in range(3)] == [False, True, True]


@pytest.mark.requirement("R-18")
def test_tombstones_hold_no_more_than_their_limit_however_long_they_are_kept() -> None:
    table = table_of(tombstones=16)
    tracemalloc.start()
    try:
        for id in range(2**60, 2**60 + 20_000):
            table.bury(id, now=0.0, keep=2.0**60)
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 16 * 1024


def test_tombstones_that_are_over_go_with_the_next_burial() -> None:
    table = table_of(tombstones=10_000)
    tracemalloc.start()
    try:
        for id in range(20_000):
            table.bury(id, now=float(id), keep=10.0)
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 16 * 1024
