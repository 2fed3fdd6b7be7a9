"""Topics: a program publishes an update once, and every subscriber receives it.

    prices = muxkit.Topic(Price)
    async with muxkit.open_server(muxkit.by_name({"prices": prices}), url):
        await prices.publish(Price("tea", 3))

    async with session.subscribe("prices", codec=muxkit.Json(Price)) as updates:
        async for price in updates: ...

An update is encoded once and stored once for all subscribers. For each subscriber, the topic only stores its position.
So a slow subscriber needs no additional memory. If the topic has dropped an update before a subscriber received it, the
subscriber's policy (`OnLag`) says what happens.
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
