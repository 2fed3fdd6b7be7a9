"""The examples do what they say; each is run as a program of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

pytestmark = pytest.mark.timeout(400)  # programs start slowly on a busy machine


def run(name: str, *, seconds: float = 300, complains: bool = False) -> list[str]:
    """The lines that an example prints; it must succeed, and have nothing to complain about."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=seconds,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    # A link that is cut as soon as it was made tells of the outage; whether an example's own cuts do that is chance.
    outage = re.compile(r"; (trying again in|reconnecting now) ")
    complaints = [line for line in done.stderr.splitlines() if not outage.search(line)]
    assert complains or complaints == []
    return done.stdout.splitlines()


def test_echo_brings_back_what_was_sent() -> None:
    assert run("echo") == ["b'hello'"]


def test_streams_of_yamux_bring_back_what_was_sent() -> None:
    *echoed, round_trip = run("yamux_echo")
    assert echoed == [f"stream {id}: hello {number}" for number, id in enumerate((1, 3, 5))]
    assert re.fullmatch(r"a round trip takes [\d.]+ ms", round_trip)


def test_numbers_survive_a_bad_network_and_a_restart() -> None:
    some, rest, cuts = run("restream_numbers")
    assert re.fullmatch(r"250 numbers over \d+ connections, then a break", some)
    assert re.fullmatch(r"250 more over \d+ connections, and the CRC of all 500 is right", rest)
    assert re.fullmatch(r"the relay has cut \d\d connections", cuts)


def test_a_subscriber_gets_its_prices_on_the_channel_that_it_sent() -> None:
    assert sorted(run("aqueduct_prices")) == [
        "trader: 100 orders filled, in order: True",
        "watcher: 20 ticks of TEA, each newer than the one before",
        "watcher: 20 ticks of TIN, each newer than the one before",
    ]


def test_every_job_is_done_once_however_often_the_connection_is_cut() -> None:
    lines = run("relink_work_queue")
    assert lines[-2:] == ["worker: 30 jobs done, each once: True", "over several connections: True"]


def test_samples_get_lost_and_commands_do_not() -> None:
    *shown, last = run("e3x_telemetry")
    assert [line for line in shown if "has done" in line] == [
        f"station: the probe has done 'pause {pause}'" for pause in (5, 2, 1)
    ]
    losses = [line for line in shown if re.fullmatch(r"station: sample \d+ is here, \d+ before it were lost", line)]
    assert len(losses) >= 4
    assert re.fullmatch(r"station: all 3 commands were done, \d+ packets sent again", last)


def test_a_room_hears_what_is_said_in_it_and_that_a_person_was_cut_off() -> None:
    lines = run("chat")
    assert {line for line in lines if "hello" in line} == {
        "cleo in #tea     cleo: hello",
        " bob in #tea     cleo: hello",
        " ann in #tea     cleo: hello",
        " ann in #trains  ann: hello?",
    }
    assert [line for line in lines if "gone" in line] == [
        " bob in #tea     * gone: cleo",
        " ann in #tea     * gone: cleo",
    ]


def test_two_thousand_timeouts_leave_the_connection_alive() -> None:
    assert run("rpc") == [
        "1000 calls were answered",
        "a call was declined: there is no method 'fly'",
        "2000 calls took too long; the next one says 5",
        "still at work: 0",
    ]


def test_a_line_goes_through_a_forwarded_port_and_comes_back() -> None:
    assert run("forward") == ["hello through the forward"]


def test_asyncio_tasks_talk_and_give_up_on_a_late_answer() -> None:
    assert run("asyncio_client") == [
        "300 answers in 3 rooms",
        "no answer in time; the session goes on",
        "a ping answered: True",
    ]


def test_a_service_of_anyio_answers_over_tcp_and_over_channels_of_both_backends() -> None:
    assert run("anyio_lines") == ["tcp: b'HELLO'", "a channel on Trio: b'HELLO'", "a channel on asyncio: b'HELLO'"]


def test_an_upload_goes_on_where_it_was_when_its_client_was_killed() -> None:
    lines = run("file_transfer")
    # Not line by line: the killed client may have written a line without its end.
    first, second = (int(found) for found in re.findall(r"begins at (\d+)%", "\n".join(lines)))
    assert first == 0
    assert 50 <= second <= 100
    assert lines[-1] == "arrived whole: True"


def test_a_program_that_takes_a_url_meets_bad_weather_on_virtual_time() -> None:
    whole, cuts = run("simulated_network")
    assert whole == "all numbers, in order: True"
    found = re.fullmatch(r"(\d+) connections were cut in (\d+) s", cuts)
    assert found
    assert int(found[1]) >= 2
    assert int(found[2]) >= 100


def test_a_lost_update_is_found_and_its_plan_made_one_step() -> None:
    lines = run("lost_update")
    found = re.fullmatch(r"failed with seed \d+, the \d+\w\w that was tried \(\d+ runs in \d+\.\d s\)", lines[0])
    assert found
    assert re.fullmatch(r"AssertionError: the balance is (5|10), and not 15", lines[1])
    assert re.fullmatch(r"\d+ events \(.*\) were made 1:", lines[2])
    assert lines[-2] == f"run again from its text: {lines[1].removeprefix('AssertionError: ')}"
    assert re.fullmatch(r"mended: no failure under 100 seeds \(101 runs in \d+\.\d s\)", lines[-1])


def test_a_slow_reader_delays_nobody_else() -> None:
    fast, slow, ping, late = run("slow_reader")
    assert fast == "fast: 2000 messages read, while slow was not read at all"
    assert slow == "slow: its sender waits, with 65,536 bytes under way and a window of 65,536"
    assert ping == "ping: answered beside it at once"
    assert late == "slow: 2000 messages read in the end, none was lost"


@pytest.mark.spark
@pytest.mark.timeout(1000)
@pytest.mark.skipif(sys.platform == "win32", reason="Spark wants more of a Windows machine than Java")
def test_a_stream_comes_into_a_table_and_a_second_run_brings_only_what_is_new() -> None:
    # A JVM says on its standard error that it is there.
    assert run("spark_stream_to_table", seconds=900, complains=True) == [
        "this run: 2000 readings",
        "this run: 1 readings",
        "11111111: 1000 readings, the highest 22.0",
        "22222222: 1001 readings, the highest 99.0",
    ]


def test_every_example_is_tried_here() -> None:
    ours = Path(__file__).read_text(encoding="utf-8")
    elsewhere = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    names = {path.stem for path in EXAMPLES.glob("*.py")} - elsewhere
    assert [name for name in sorted(names) if f'run("{name}"' not in ours] == []


def test_a_job_is_followed_given_up_at_the_deadline_and_cancelled() -> None:
    assert run("job_service")[1:] == [
        "job 1 went from 0 to 6 of 6 steps",
        "it is too slow: True, it is cancelled: True",
        "there is no job 99",
    ]


def test_a_chat_on_a_topic_reaches_everybody_and_shows_who_comes_and_goes() -> None:
    assert run("topic_chat") == [
        "ada reads: ada: hello",
        "ada reads: bob: bye",
        "ada reads: bob: hi",
        "bob reads: ada: hello",
        "bob reads: bob: bye",
        "bob reads: bob: hi",
        "ada joins, ada leaves, bob joins, bob leaves",
    ]


def test_a_slow_subscriber_of_prices_costs_the_others_nothing() -> None:
    assert sorted(run("price_feed")) == [
        "quick 1: the last price is 2000, after 1999 others",
        "quick 2: the last price is 2000, after 1999 others",
        "slow: the last price is 2000",
    ]
