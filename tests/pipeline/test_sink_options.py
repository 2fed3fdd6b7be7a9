"""The options of a sink, and the errors of those that are refused."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from muxkit.pipeline import SinkOptions
from muxkit.pipeline.errors import OptionError
from muxkit.pipeline.options import SINK_OPTIONS, RowEncoding, link_options

URL = "bpmux+tcp://127.0.0.1:7000"


def test_the_url_is_enough() -> None:
    options = SinkOptions.parse({"url": URL}, streaming=True)
    assert options == SinkOptions(urls=(URL,))
    assert (options.stream, options.app, options.channels, options.window) == ("main", None, 1, 1 << 20)
    assert (options.ttl, options.patience, options.encoding) == (86_400.0, 60.0, RowEncoding.AUTO)


def test_every_option_is_read_in_any_case() -> None:
    given = {
        "URLS": f"{URL}  relink+tcp://127.0.0.1:7001/x",
        "STREAM": "orders",
        "txnappid": "nightly",
        "txnTTL": "2h",
        "Channels": "4",
        "windowbytes": "64k",
        "encoding": "JSON",
        "token": "secret",
        "patience": "500ms",
        "insecure": "true",
        "path": "",
        "checkpointLocation": "checkpoint",
    }
    options = SinkOptions.parse(given, streaming=True)
    assert options.urls == (URL, "relink+tcp://127.0.0.1:7001/x")
    assert (options.stream, options.app, options.ttl, options.channels) == ("orders", "nightly", 7200.0, 4)
    assert (options.window, options.encoding, options.patience) == (65_536, RowEncoding.JSON, 0.5)
    assert link_options(URL, options.tls) == {"insecure": True}
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("given", "option", "told"),
    [
        ({}, "url", "it is missing; such as bpmux"),
        ({"url": URL, "urls": URL}, "urls", "url is given as well"),
        ({"url": f"{URL} {URL}1"}, "url", "that is the option urls"),
        ({"urls": f"{URL} {URL}"}, "urls", "named twice"),
        ({"url": "127.0.0.1:7000"}, "url", "expected a URL such as"),
        ({"url": "tcp://127.0.0.1:7000"}, "url", "expected a URL such as"),
        ({"url": URL, "stream": "x" * 256}, "stream", "printable characters"),
        ({"url": URL, "txnAppId": "a\nb"}, "txnAppId", "printable characters"),
        ({"url": URL, "txnId": "x"}, "txnId", "it is for batch writes"),
        ({"url": URL, "txnTtl": "soon"}, "txnTtl", "expected a time"),
        ({"url": URL, "channels": "0"}, "channels", "expected a whole number above 0"),
        ({"url": URL, "channels": "65"}, "channels", "expected at most 64, got 65"),
        ({"url": URL, "windowBytes": "4095"}, "windowBytes", "expected at least 4096 bytes, got 4095"),
        ({"url": URL, "encoding": "xml"}, "encoding", "expected one of auto, value, json"),
        ({"url": URL, "patience": "-1"}, "patience", "expected a time"),
        ({"url": URL, "tlsKeyFile": "k.pem"}, "tlsKeyFile", "a key without a certificate"),
        ({"url": URL, "windowbites": "1"}, "windowbites", "there is no such option; there are channels, "),
    ],
)
def test_a_slip_names_its_option(given: dict[str, str], option: str, told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        SinkOptions.parse(given, streaming=True)
    assert caught.value.option == option


def test_each_kind_of_write_has_its_own_way_to_be_known_again() -> None:
    assert SinkOptions.parse({"url": URL, "txnId": "load 7"}, streaming=False).txn == "load 7"
    with pytest.raises(OptionError, match="txnAppId: it is for streaming queries; a batch write has txnId"):
        SinkOptions.parse({"url": URL, "txnAppId": "x"}, streaming=False)


def test_an_encrypted_url_gets_a_context() -> None:
    options = SinkOptions.parse({"url": "bpmux+tls://127.0.0.1:7000", "tlsServerHostname": "x"}, streaming=True)
    found = link_options(options.urls[0], options.tls)
    assert found["server_hostname"] == "x"
    assert found["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert link_options(URL, SinkOptions.parse({"url": URL}, streaming=True).tls) == {}


@pytest.mark.parametrize("name", ["tlsCaFile", "tlsCertFile"])
def test_a_file_that_is_not_there_names_its_option(name: str) -> None:
    options = SinkOptions.parse({"url": "bpmux+tls://127.0.0.1:7000", name: "/nowhere.pem"}, streaming=True)
    with pytest.raises(OptionError, match=rf"option {name}: /nowhere.pem: "):
        link_options(options.urls[0], options.tls)


def test_every_option_is_on_the_page() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "spark-sink.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in SINK_OPTIONS if f"`{name}`" not in text] == []
