"""A job service: submit, follow the progress, cancel, and a deadline for all of it.

With a URL as argument, it goes on serving for `muxkit describe URL` and `muxkit call URL Jobs.submit '{"steps": 5}'`.
"""

import sys
from collections.abc import AsyncIterator

import msgspec
import trio

import muxkit
from muxkit import rpc


class Job(msgspec.Struct):
    id: int
    steps: int
    done: int = 0
    is_cancelled: bool = False


class Jobs:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._jobs: dict[int, Job] = {}

    async def submit(self, steps: int) -> Job:
        job = self._jobs[len(self._jobs) + 1] = Job(len(self._jobs) + 1, steps)
        self._nursery.start_soon(self._work, job)
        return job

    @rpc.method(raises=KeyError)  # the client gets this exception as it is
    async def cancel(self, id: int) -> Job:
        self._jobs[id].is_cancelled = True
        return self._jobs[id]

    @rpc.stream
    async def progress(self, id: int) -> AsyncIterator[Job]:
        job = self._jobs[id]
        while job.done < job.steps and not job.is_cancelled:
            yield job
            await trio.sleep(0.1)
        yield job

    async def _work(self, job: Job) -> None:  # no method that clients call, because of its underscore
        while job.done < job.steps and not job.is_cancelled:
            await trio.sleep(0.05)
            job.done += 1


async def use(jobs: Jobs) -> None:
    job = await jobs.submit(steps=6)
    async with jobs.progress(job.id) as updates:
        done = [update.done async for update in updates]
    print(f"job {job.id} went from {done[0]} to {done[-1]} of {job.steps} steps")
    slow = await jobs.submit(steps=1_000_000)
    with trio.move_on_after(0.5) as scope:  # the deadline travels with the call
        async with jobs.progress(slow.id) as updates:
            done = [update.done async for update in updates]
    print(f"it is too slow: {scope.cancelled_caught}, it is cancelled: {(await jobs.cancel(slow.id)).is_cancelled}")
    try:
        await jobs.cancel(99)
    except KeyError as error:
        print("there is no job", error)


async def main(*urls: str) -> None:
    async with trio.open_nursery() as nursery:
        async with muxkit.open_server(rpc.serve(Jobs(nursery)), urls or "bpmux+tcp://127.0.0.1:0") as server:
            print("serving on", server.url, flush=True)
            async with rpc.connect(Jobs, server.url) as jobs:
                await use(jobs)
            if urls:
                await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
