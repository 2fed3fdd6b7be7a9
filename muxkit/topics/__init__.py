"""Topics: publish once, and every subscriber gets it.

    prices = muxkit.Topic(Price)
    async with muxkit.open_server(muxkit.by_name({"prices": prices}), url):
        await prices.publish(Price("tea", 3))

    async with session.subscribe("prices", codec=muxkit.Json(Price)) as updates:
        async for price in updates: ...

An update is encoded once, and kept once for all subscribers. Each subscriber has a position in it. So a slow
subscriber takes no memory, and its policy says what happens when the updates that it didn't get are no longer kept.
"""

from muxkit.runtime import Lagged as Lagged
from muxkit.runtime import OnLag as OnLag
from muxkit.runtime import Subscription as Subscription
from muxkit.runtime import protect_package
from muxkit.topics._journal import Journal as Journal
from muxkit.topics._presence import Member as Member
from muxkit.topics._presence import Presence as Presence
from muxkit.topics._topic import Topic as Topic

__all__ = ["Journal", "Lagged", "Member", "OnLag", "Presence", "Subscription", "Topic"]

protect_package(__name__)
