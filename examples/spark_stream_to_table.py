"""Two thermometers stream into a table through Spark, each reading once, also over a second start of the query."""

import queue
import tempfile
import threading
from functools import partial

import trio
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

from muxkit.pipeline import spark_session
from muxkit.protocols import restream

KITCHEN, CELLAR = "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000002"


async def serve(ready: queue.Queue[str], more: threading.Event) -> None:
    """Serve with status requests, so that Spark can plan; append readings when there are some."""
    async with restream.open_store("memory:", keep=24 * 3600) as store, trio.open_nursery() as nursery:
        for uuid in (KITCHEN, CELLAR):
            await store.register(uuid, {}, params={}, attached=False)
        await store.append_many(KITCHEN, [{"celsius": 20.0 + n % 3} for n in range(1000)])
        await store.append_many(CELLAR, [{"celsius": 11.0 + n % 3} for n in range(1000)])
        config = restream.ServerConfig(status=True)
        where = "restream+tcp://127.0.0.1:0"
        serving = partial(restream.serve, where, store, application=restream.Fed(), config=config)
        served: restream.Served = await nursery.start(serving)
        ready.put(served.url)
        await trio.to_thread.run_sync(more.wait)
        await store.append(CELLAR, {"celsius": 99.0})
        ready.put("there is one more")


def run(spark: SparkSession, url: str, folder: str) -> None:
    """Write everything that is there now into the table."""
    stream = spark.readStream.format("muxkit").option("servers", url).option("streams", f"{KITCHEN} {CELLAR}")
    data = from_json(col("value").cast("string"), "celsius DOUBLE")
    rows = stream.option("reader", "table").load().withColumn("data", data).select("stream", "id", "data.celsius")
    writer = rows.writeStream.format("parquet").option("path", f"{folder}/table")
    query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()
    print(f"this run: {sum(batch.numInputRows for batch in query.recentProgress)} readings")


def main() -> None:
    ready: queue.Queue[str] = queue.Queue()
    more = threading.Event()
    threading.Thread(target=trio.run, args=(serve, ready, more), daemon=True).start()
    url, spark = ready.get(), spark_session()
    with tempfile.TemporaryDirectory() as folder:
        run(spark, url, folder)
        more.set()
        ready.get()
        run(spark, url, folder)
        table = spark.read.parquet(f"{folder}/table")
        for row in table.groupBy("stream").agg({"celsius": "max", "id": "count"}).orderBy("stream").collect():
            print(f"{row['stream'][:8]}: {row['count(id)']} readings, the highest {row['max(celsius)']}")
    spark.stop()


if __name__ == "__main__":
    main()
