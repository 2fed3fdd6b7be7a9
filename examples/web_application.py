"""A FastAPI application that takes prices by REST, and streams each change to muxkit clients, on one port.

Run it with any ASGI server on asyncio, from the folder of this file:

    uvicorn web_application:application --port 8000
    hypercorn web_application:application --bind 127.0.0.1:8000

    curl -X PUT http://127.0.0.1:8000/prices/tea -H 'Content-Type: application/json' -d '{"price": 3.5}'

A client watches prices on a channel, whose name says which: it connects to bpmux+ws://127.0.0.1:8000/mux.
`python web_application.py` runs the application under uvicorn, and such a client beside it.
"""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import WebSocketRoute

import muxkit
import muxkit.asyncio
from muxkit_adapters import asgi


class Price(BaseModel):
    price: float


class Prices:
    """The latest prices, and an event that tells their watchers about a change."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._changed = asyncio.Event()

    def set(self, name: str, price: float) -> None:
        self.latest[name] = price
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until a price changes."""
        await self._changed.wait()


prices = Prices()


async def watch(channel: muxkit.asyncio.Channel) -> None:
    """Send the price of `channel.name` now and after each change. A slow client skips prices, and delays nobody."""
    sent: float | None = None
    while True:
        price = prices.latest.get(channel.name)
        if price != sent:
            await channel.send(json.dumps(price).encode())  # waits until the client has room for it
            sent = price
        else:
            await prices.change()


async def authorize(info: muxkit.SessionInfo, token: str | None) -> str | None:
    """Decide by the request of the WebSocket who may connect, as a REST route does by its own request."""
    assert info.request is not None
    headers = dict(info.request.headers)
    if "x-user" not in headers:  # your application would check a cookie or a token here
        raise muxkit.Refused("send the header X-User")
    return headers["x-user"]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Run the muxkit server as long as the application."""
    # A watcher ends with the next change at the earliest, so the application doesn't wait long for it when it stops.
    async with muxkit.asyncio.open_server(watch, "bpmux+asgi://prices", authorize=authorize, linger=0.5):
        yield


application = FastAPI(lifespan=lifespan, routes=[WebSocketRoute("/mux", asgi.app("prices"))])


@application.put("/prices/{name}")
async def put_price(name: str, price: Price) -> dict[str, float]:
    prices.set(name, price.price)
    return prices.latest


@application.get("/prices")
async def get_prices() -> dict[str, float]:
    return prices.latest


def put(url: str, price: float) -> None:
    """Set a price by REST."""
    body = json.dumps({"price": price}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request).close()


async def try_it(address: str) -> None:
    """Watch the price of tea while it is changed by REST."""
    url, headers = f"bpmux+ws://{address}/mux", {"X-User": "ann"}
    async with muxkit.asyncio.connect(url, headers=headers) as session, session.open("tea") as tea:
        for price in (3.5, 4.25):
            await asyncio.to_thread(put, f"http://{address}/prices/tea", price)
            print("tea costs", json.loads(await tea.receive()))
        tea.abort("seen enough")


async def main() -> None:
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    await try_it(f"{host}:{port}")
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
