"""Numbers through a network that cuts each connection after some hundred bytes, and through a restart of the reader."""

import json

import trio

from muxkit.protocols import restream
from muxkit.testing import ChaosPlan, Way, chaos_relay

COUNT = 500
BAD = ChaosPlan(cut_after=(0, 2_000), cut_ways=(Way.BACK,), reset=0.3)
# The server deletes what is acknowledged, so this is done by hand, after the own state is saved.
BY_HAND = restream.ClientConfig(ack_every=None)


async def read_some(url: str, enough: int) -> str:
    """Read the first numbers; return what another process needs to go on."""
    async with restream.numbers(url, count=COUNT, config=BY_HAND) as numbers:
        async for _ in numbers:
            if numbers.last_id == enough:
                break
        saved = json.dumps(numbers.snapshot())  # here it would be written to a file
        numbers.acknowledge()
    print(f"{enough} numbers over {numbers.connections} connections, then a break")
    return saved


async def read_the_rest(url: str, saved: str) -> None:
    """Go on with number 251, as if nothing had happened."""
    got = 0
    async with restream.numbers(url, resume=json.loads(saved), config=BY_HAND) as numbers:
        async for _ in numbers:
            got += 1
        numbers.acknowledge()
    print(f"{got} more over {numbers.connections} connections, and the CRC of all {numbers.last_id} is right")


async def main() -> None:
    async with restream.open_store("memory:") as store, trio.open_nursery() as nursery:
        served = await nursery.start(restream.serve, "restream+tcp://127.0.0.1:0", store)
        async with chaos_relay(served.url.removeprefix("restream+"), BAD, seed=1) as relay:
            url = f"restream+tcp://{relay.address}"
            saved = await read_some(url, COUNT // 2)
            await read_the_rest(url, saved)
            print(f"the relay has cut {relay.cuts} connections")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
