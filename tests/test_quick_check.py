"""Protocols whose `isinstance` checks are quick."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import pytest

from muxkit._quick_check import QuickCheck, _members


@runtime_checkable
class _Named(Protocol, metaclass=QuickCheck):
    @property
    def name(self) -> str: ...


@runtime_checkable
class _Sized(_Named, Protocol, metaclass=QuickCheck):
    size: int

    def shrink(self) -> None: ...


@attrs.define
class _Box(_Sized):
    size: int = 1
    name: str = "box"

    def shrink(self) -> None: ...


class _Open:
    """Has what it is given, as a link that wraps another one may have what that has."""

    def __init__(self, **given: object) -> None:
        vars(self).update(given)


def test_an_object_with_all_members_has_the_protocol() -> None:
    assert isinstance(_Open(name="", size=0, shrink=int), _Sized)


@pytest.mark.parametrize("missing", ["name", "size", "shrink"])
def test_an_object_without_one_member_does_not_have_the_protocol(missing: str) -> None:
    given: dict[str, object] = {"name": "", "size": 0, "shrink": int}
    del given[missing]

    assert not isinstance(_Open(**given), _Sized)


def test_two_objects_of_one_class_may_differ() -> None:
    assert [isinstance(each, _Named) for each in (_Open(name=""), _Open(), _Open(name=""))] == [True, False, True]


def test_a_class_that_implements_a_protocol_is_checked_as_any_class() -> None:
    assert isinstance(_Box(), _Box)
    assert not isinstance(_Open(name="", size=0, shrink=int), _Box)


def test_the_members_are_collected_once() -> None:
    _members.cache_clear()
    for _ in range(5):
        assert isinstance(_Box(), _Named)

    assert _members.cache_info().misses == 1
