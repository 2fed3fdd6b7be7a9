"""The codec and the rules of the JavaScript client hold for the same vectors as those of the Python engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.protocols import _vectors as vectors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.web._node import Node

ROWS = vectors.rows_of("bpmux")

# Each function returns what is wrong with a row, or nothing. `node` gets the file of the vectors as its argument.
TOOLS = """
const bytesOf = (row) => Uint8Array.from(Buffer.from([row.hex].flat().join("").replaceAll(" ", ""), "hex"));
const hex = (bytes) => Buffer.from(bytes).toString("hex");
const quiet = { wantsToWrite() {}, entityGone() {}, ponged() {}, opened() {} };
const LIMITS = { window: 65536, message: 1 << 24, channels: 100, backlog: 100, pongs: 100, reassembly: 1 << 26 };

class Recorder extends wire.Checks {
  chunks = [];
  apply(chunk) {
    this.chunks.push(chunk);
  }
}

function parsed(bytes, step) {
  const recorder = new Recorder();
  const reader = new wire.ChunkReader(recorder);
  for (let at = 0; at < bytes.length; at += step) reader.receive(bytes.slice(at, at + step));
  if (reader.isInsideChunk) throw new Error("the bytes end inside of a chunk");
  return recorder.chunks;
}

"""
CHECKS = (
    TOOLS
    + """
import { readFileSync } from "node:fs";

const rows = JSON.parse(readFileSync(args[0], "utf8"));
const encoded = (chunk) =>
  chunk.type === wire.Type.PARTIAL ? wire.encodePartial(chunk.total) : wire.encodeChunk(chunk);

function number(row) {
  const value = BigInt(/varu64 (\\d+)$/.exec(row.name)[1]);
  if (hex(wire.encodeNumber(value)) !== hex(bytesOf(row))) return `encoded as ${hex(wire.encodeNumber(value))}`;
  const [chunk] = parsed(Buffer.concat([Buffer.of(0x44), bytesOf(row)]), 1);
  if (BigInt(chunk.id) !== value) return `decoded as ${chunk.id}`;
}

function badNumber(row) {
  try {
    parsed(Buffer.concat([Buffer.of(0x44), bytesOf(row)]), 1 << 20);
  } catch (error) {
    const isCut = String(row.meaning).startsWith("eof");
    if (isCut !== !(error instanceof ProtocolError)) return String(error);
    return;
  }
  return "accepted";
}

function chunks(row) {
  const bytes = bytesOf(row);
  const expected = Uint8Array.from(bytes);
  if (bytes[0] >> 5 === wire.Type.PARTIAL) expected[0] &= 0xe7; // two bits of a Partial are ignored
  for (const step of [1, 2, bytes.length]) {
    const again = Buffer.concat(parsed(bytes, step).map((chunk) => Buffer.from(encoded(chunk))));
    if (hex(again) !== hex(expected)) return `with ${step} bytes at a time: ${hex(again)}`;
  }
}

function violation(row) {
  const engine = new wire.Engine(quiet, LIMITS);
  if (row.before !== undefined) engine.receive(bytesOf({ hex: row.before }));
  try {
    engine.receive(bytesOf(row));
  } catch (error) {
    if (!(error instanceof ProtocolError)) return String(error);
    if (row.rule !== undefined && row.rule !== error.rule) return error.rule;
    return;
  }
  return "accepted";
}

for (const row of rows) {
  const isNumber = row.name.startsWith("varu64");
  const wanted = row.expect.split(":")[0];
  const check = wanted === "wire" ? (isNumber ? number : chunks) : isNumber ? badNumber : violation;
  let wrong;
  try {
    wrong = check(row);
  } catch (error) {
    wrong = String(error);
  }
  say([row.name, wrong ?? null]);
}
"""
)


async def wrong_rows(node: Node, rows: Path) -> list[list[str]]:
    return [said for said in await node.run(CHECKS, str(rows)) if said[1] is not None]


@pytest.mark.clause("bpmux-G03", "bpmux-G04", "bpmux-G05", "bpmux-G11", "bpmux-G12", "bpmux-G13", "bpmux-G20")
async def test_all_vectors_of_bpmux_hold_in_javascript(node: Node) -> None:
    said = await node.run(CHECKS, str(vectors.DATA / "bpmux.json"))
    assert len(said) == len(ROWS)
    assert [row for row in said if row[1] is not None] == []


async def test_rows_that_are_wrong_are_noticed_in_javascript(node: Node, tmp_path: Path) -> None:
    rows = [
        {"name": "varu64 247", "hex": "f6", "expect": "wire"},
        {"name": "varu64 invalid", "hex": "f8f8", "expect": "reject"},
        {"name": "a chunk", "hex": "5007026869", "expect": "reject"},
        {"name": "a violation", "hex": "e005e005", "expect": "wire: both are parsed"},
        {"name": "a chunk that is cut", "hex": "50070268", "expect": "wire"},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    assert [name for name, _ in await wrong_rows(node, path)] == [
        "varu64 247",
        "varu64 invalid",
        "a chunk",
        "a chunk that is cut",
    ]


async def test_the_end_of_the_sending_half_of_a_duplex_goes_out_first(node: Node) -> None:
    script = """
    const engine = new wire.Engine(quiet, LIMITS);
    const [sink, stream] = engine.open(wire.Type.DUPLEX, new Uint8Array(0));
    engine.take();
    engine.receive(wire.encodeChunk({ type: wire.Type.IN_STREAM, id: sink.id, credit: 200_000 }));
    engine.send(sink, new Uint8Array(150_000)); // more than one turn of writing
    engine.finish(sink);
    engine.finish(stream);
    const written = [];
    while (engine.hasOutput) written.push(engine.take());
    const chunks = parsed(Buffer.concat(written), 1 << 20);
    say(chunks.filter((chunk) => chunk.end !== undefined).map((chunk) => chunk.type));
    """
    # The peer counts the other order as a cancellation of work that it still does.
    assert await node.run(TOOLS + script) == [[2, 4]]
