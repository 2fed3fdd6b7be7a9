"""A restream server for tests of the source: in a thread of its own, since Spark and its callers know no Trio."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from muxkit.protocols import restream
from muxkit.runtime import background
from muxkit.testing import chaos_relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from muxkit.testing import ChaosPlan

ResultT = TypeVar("ResultT")

ONE = "10000000-0000-4000-8000-000000000001"
TWO = "20000000-0000-4000-8000-000000000002"
THREE = "30000000-0000-4000-8000-000000000003"
DIRECTORY = "d0000000-0000-4000-8000-00000000000d"
KEEP = 24 * 3600.0  # s


class Hall:
    """A server that runs, with its store."""

    def __init__(self, url: str, store: Any, token: trio.lowlevel.TrioToken) -> None:  # noqa: ANN401 - any kind
        self.url = url
        self.store = store
        self.token = token

    def do(self, act: Callable[..., Awaitable[ResultT]], *args: object, **kwargs: object) -> ResultT:
        """Call something of the store, from where the test is."""
        return trio.from_thread.run(partial(act, *args, **kwargs), trio_token=self.token)

    def feed(self, uuid: str, data: Sequence[object], *, time: float | None = None, name: str | None = None) -> None:
        """Append to a session, which is made if it is not there."""
        self.do(feed, self.store, uuid, data, time=time, name=name)

    def remove(self, uuid: str) -> None:
        self.do(self.store.remove, uuid)

    def finish(self, uuid: str) -> None:
        self.do(self.store.finish, uuid)

    def acknowledged(self, uuid: str) -> int:
        status: restream.Status = self.do(self.store.status, uuid)
        return status.acknowledged


async def feed(
    store: Any,  # noqa: ANN401 - any kind
    uuid: str,
    data: Sequence[object],
    *,
    time: float | None = None,
    name: str | None = None,
) -> None:
    known = {status.uuid for status in await store.sessions()}
    if uuid not in known:
        params = {} if name is None else {"stream": name}
        await store.register(uuid, {}, params=params, attached=False, keep=KEEP)
    for first in range(0, len(data), 1000):
        await store.append_many(uuid, data[first : first + 1000], time=time)


@contextmanager
def hall(
    listen: str = "restream+tcp://127.0.0.1:0", *, store: str = "memory:", status: bool = True, **options: Any
) -> Iterator[Hall]:
    """A server of fed sessions, until the block ends."""
    ready = threading.Event()
    halls: list[Hall] = []
    errors: list[BaseException] = []
    scope = trio.CancelScope()

    async def main() -> None:
        with scope:
            async with restream.open_store(store, keep=KEEP) as opened, background() as nursery:
                served = await nursery.start(
                    partial(
                        restream.serve,
                        listen,
                        opened,
                        application=options.pop("application", restream.Fed()),
                        config=restream.ServerConfig(status=status, listing=status, line=4 << 20),
                        **options,
                    )
                )
                halls.append(Hall(served.url, opened, trio.lowlevel.current_trio_token()))
                ready.set()
                await trio.sleep_forever()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if errors:
        thread.join()
        raise errors[0]
    try:
        yield halls[0]
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=halls[0].token)
        thread.join()


class Relay:
    """A bad network before a server."""

    def __init__(self, url: str, relay: Any) -> None:  # noqa: ANN401 - what `chaos_relay` gives
        self.url = url
        self._relay = relay

    def cuts(self) -> int:
        number: int = self._relay.cuts
        return number


@contextmanager
def relay_to(there: Hall, plan: ChaosPlan, *, seed: int) -> Iterator[Relay]:
    """In the loop of the server that it stands before."""
    relays: list[Relay] = []
    ready, scope = threading.Event(), trio.CancelScope()

    async def main() -> None:
        try:
            with scope:
                async with chaos_relay(there.url.removeprefix("restream+"), plan, seed=seed) as relay:
                    relays.append(Relay(f"restream+tcp://{relay.address}", relay))
                    ready.set()
                    await trio.sleep_forever()
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: there.do(main))
    thread.start()
    ready.wait()
    try:
        yield relays[0]
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=there.token)
        thread.join()
