"""A bug that needs bad luck, found and made small: two clients add to one account, and an addition gets lost.

`python examples/lost_update.py` runs the program under one network fault plan after another until the sum is wrong,
then looks for the smallest plan with which it still is. The mended program, which lets the server add, passes them all.
"""

import trio

import muxkit
from muxkit.testing import SimNetwork, explore, run_plan

PAYMENTS = {"alice": 10, "bob": 5}


class Bank:
    """The server: `get`, `set N` and `add N`, each answered with the balance."""

    def __init__(self) -> None:
        self.balance = 0

    async def serve(self, channel: muxkit.Channel) -> None:
        async for message in channel:
            command, _, number = message.decode().partition(" ")
            if command == "set":
                self.balance = int(number)
            elif command == "add":
                self.balance += int(number)
            await channel.send(b"%d" % self.balance)


async def ask(channel: muxkit.Channel, request: str) -> int:
    await channel.send(request.encode())
    return int(await channel.receive())


async def pay(url: str, amount: int, *, is_mended: bool) -> None:
    """A client: here is the bug. Between `get` and `set` another client may have paid."""
    async with muxkit.connect(url) as session, session.open("account") as channel:
        if is_mended:
            await ask(channel, f"add {amount}")
        else:
            balance = await ask(channel, "get")
            await ask(channel, f"set {balance + amount}")


async def both_pay(network: SimNetwork, *, is_mended: bool = False) -> None:
    """The program to explore: the clients pay a second apart, so on a good network nothing goes wrong."""
    bank = Bank()
    async with muxkit.open_server(bank.serve, "bpmux+sim://bank"):
        async with trio.open_nursery() as nursery:
            for client, amount in PAYMENTS.items():

                async def run(url: str = f"bpmux+sim://{client}@bank", amount: int = amount) -> None:
                    await pay(url, amount, is_mended=is_mended)

                nursery.start_soon(run)
                await trio.sleep(1)
    if bank.balance != 15:
        raise AssertionError(f"the balance is {bank.balance}, and not 15")


async def mended(network: SimNetwork) -> None:
    await both_pay(network, is_mended=True)


def main() -> None:
    # A connection that was cut is no bug of this program: it says so, and the payment can be looked up.
    found = explore(both_pay, seeds=range(500), expected=(muxkit.LinkLost, OSError))
    print(found)
    if found.plan is not None:
        again = run_plan(both_pay, str(found.plan))
        print(f"run again from its text: {again.error}")
    print(f"mended: {explore(mended, seeds=range(100), expected=(muxkit.LinkLost, OSError))}")


if __name__ == "__main__":
    main()
