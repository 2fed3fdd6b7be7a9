"""A job service: submit, follow the progress, cancel, and a deadline for all of it.

`python examples/job_service.py` runs a server and a client. `python examples/job_service.py serve URL` serves for other
programs, and for the command line: `muxkit describe URL`, `muxkit call URL Jobs.submit '{"steps": 5}'`.
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


class Jobs(rpc.Service):
    async def submit(self, steps: int) -> Job: ...
    async def cancel(self, id: int) -> Job: ...
    def progress(self, id: int) -> rpc.Stream[Job]: ...


class JobService(Jobs):
    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.jobs: dict[int, Job] = {}

    async def submit(self, steps: int) -> Job:
        job = self.jobs[len(self.jobs) + 1] = Job(len(self.jobs) + 1, steps)
        self.nursery.start_soon(self.work, job)
        return job

    async def work(self, job: Job) -> None:
        while job.done < job.steps and not job.is_cancelled:
            await trio.sleep(0.05)
            job.done += 1

    async def cancel(self, id: int) -> Job:
        if id not in self.jobs:
            raise rpc.Error("not_found", f"there is no job {id}")
        self.jobs[id].is_cancelled = True
        return self.jobs[id]

    @rpc.stream
    async def progress(self, id: int) -> AsyncIterator[Job]:
        job = self.jobs[id]
        while job.done < job.steps and not job.is_cancelled:
            yield job
            await trio.sleep(0.1)
        yield job


async def use(jobs: Jobs) -> None:
    job = await jobs.submit(steps=6)
    async with jobs.progress(job.id) as updates:
        done = [update.done async for update in updates]
    print(f"job {job.id} went from {done[0]} to {done[-1]} of {job.steps} steps")
    endless = await jobs.submit(steps=1_000_000)
    with trio.move_on_after(0.5) as scope:  # the deadline travels with the call
        async with jobs.progress(endless.id) as updates:
            async for _ in updates:
                pass
    job = await jobs.cancel(endless.id)
    print(f"job {job.id} is too slow: {scope.cancelled_caught}, it is cancelled: {job.is_cancelled}")
    try:
        await jobs.cancel(99)
    except rpc.Error as error:
        print(error)


async def main(url: str = "bpmux+tcp://127.0.0.1:0", *, serve_only: bool = False) -> None:
    async with trio.open_nursery() as nursery:
        async with muxkit.open_server(rpc.serve(JobService(nursery)), url) as server:
            print("serving on", server.url, flush=True)
            if serve_only:
                await trio.sleep_forever()
            async with muxkit.connect(server.url) as session:
                await use(rpc.client(Jobs, session))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        trio.run(lambda: main(sys.argv[2], serve_only=True))
    else:
        trio.run(main)
