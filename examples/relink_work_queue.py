"""A work queue whose jobs are done once each, though the connection between queue and worker is cut again and again."""

import trio

from muxkit.protocols import relink
from muxkit.runtime import Backoff
from muxkit.testing import ChaosPlan, Cut, chaos_relay

JOBS = 1  # the channel that carries them
CONFIG = relink.Config(listener_transactions=True)  # the queue's messages wait until they are committed
HARD = {7, 19}  # jobs that fail at the first attempt
done: list[int] = []


async def hand_out(link: relink.Link) -> None:
    """The queue: jobs go out in batches, and what could not be done goes out again."""
    waiting = list(range(30))
    async with link.sender(JOBS) as sender:
        while waiting:
            batch, waiting = waiting[:5], waiting[5:]
            await sender.send(b"a job that is withdrawn before anybody sees it")
            sender.rollback()
            receipts = [await sender.send(str(job).encode()) for job in batch]
            sender.commit()
            for job, receipt in zip(batch, receipts, strict=True):
                try:
                    await receipt.committed()  # it is done, and the queue may forget it
                except relink.NotCommitted:
                    print(f"queue: job {job} was not done, it goes out again")
                    waiting.append(job)


async def work(message: relink.Message) -> None:
    """The worker: returning says that the job is done, raising says that it is not."""
    job = int(message.data)
    await trio.sleep(0.005)
    if job in HARD:
        HARD.remove(job)
        raise RuntimeError(f"job {job} is too hard today")
    done.append(job)


async def main() -> None:
    async with trio.open_nursery() as nursery:
        listening = await nursery.start(serve)
        address = listening.url.removeprefix("relink+tcp://").removesuffix("/queue")
        async with chaos_relay(address, ChaosPlan()) as relay:

            async def work_in_bad_weather(message: relink.Message) -> None:
                await work(message)
                if len(done) % 3 == 0:
                    relay.cut_all(Cut.RESET)  # for both sides as if the other had been killed

            soon = Backoff(first=0.01, most=0.1)  # cuts come far more often here than the default is made for
            async with relink.link(f"relink+tcp://{relay.address}/queue", config=CONFIG, backoff=soon) as link:
                async with link.receiver(JOBS) as receiver:
                    await receiver.process(work_in_bad_weather)  # until the queue closes the channel
                connections = link.connections
        print(f"worker: {len(done)} jobs done, each once: {sorted(done) == list(range(30))}")
        print(f"over several connections: {connections > 3}")
        nursery.cancel_scope.cancel()


async def serve(task_status: trio.TaskStatus[relink.Listening]) -> None:
    await relink.listen(hand_out, "relink+tcp://127.0.0.1:0/queue", config=CONFIG, task_status=task_status)


if __name__ == "__main__":
    trio.run(main)
