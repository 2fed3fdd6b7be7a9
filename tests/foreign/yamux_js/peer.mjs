// A peer for the tests of muxkit's yamux: the same verbs as `yamux_go`, with @chainsafe/libp2p-yamux.
//
//   node peer.mjs client|server HOST:PORT

import { createHash } from "node:crypto";
import { connect, createServer } from "node:net";
import { yamux } from "@chainsafe/libp2p-yamux";

const quiet = Object.assign(() => {}, { error() {}, trace() {}, enabled: false });
const logger = { forComponent: () => quiet };

const pattern = (size, seed) => Uint8Array.from({ length: size }, (_, index) => (index * 7 + (index >> 8) + seed) & 0xff);

async function* bytesOf(stream) {
  for await (const list of stream.source) yield list.subarray();
}

async function* chunks(data) {
  for (let at = 0; at < data.length; at += 65536) yield data.subarray(at, at + 65536);
}

async function call(muxer, size, seed) {
  const stream = await muxer.newStream();
  const sent = Buffer.from(pattern(size, seed));
  const writing = stream.sink(chunks(sent)).then(() => stream.closeWrite());
  const got = [];
  for await (const piece of bytesOf(stream)) got.push(Buffer.from(piece));
  await writing;
  await stream.close();
  if (!Buffer.concat(got).equals(sent)) throw new Error(`${size} bytes came back different`);
}

async function serve(muxer, stream) {
  const pieces = bytesOf(stream);
  let head = Buffer.alloc(0);
  while (!head.includes(10)) {
    const { done, value } = await pieces.next();
    if (done) return stream.close();
    head = Buffer.concat([head, value]);
  }
  const end = head.indexOf(10);
  const [verb, ...numbers] = head.subarray(0, end).toString().split(" ");
  const [first = 0, second = 0] = numbers.map(Number);
  const rest = head.subarray(end + 1);
  async function* all() {
    if (rest.length) yield rest;
    yield* pieces;
  }
  const answer = (text) => stream.sink(chunks(Buffer.from(`${text}\n`)));
  if (verb === "echo") {
    await stream.sink(all());
  } else if (verb === "digest") {
    await new Promise((resolve) => setTimeout(resolve, first));
    const hash = createHash("sha256");
    let size = 0;
    for await (const piece of all()) {
      hash.update(piece);
      size += piece.length;
    }
    await answer(`${size} ${hash.digest("hex")}`);
  } else if (verb === "source") {
    await stream.sink(chunks(pattern(first, second)));
  } else if (verb === "open") {
    try {
      await Promise.all(Array.from({ length: first }, (_, seed) => call(muxer, second, seed)));
      await answer("ok");
    } catch (error) {
      await answer(error);
    }
  } else if (verb === "ping") {
    await muxer.ping();
    await answer("ok");
  } else {
    await answer(`what is "${verb}"?`);
  }
  await stream.close();
}

async function run(socket, direction) {
  const muxer = yamux({ enableKeepAlive: false })({ logger }).createStreamMuxer({
    direction,
    onIncomingStream: (stream) => serve(muxer, stream).catch(() => stream.abort(new Error("failed"))),
  });
  const writing = (async () => {
    for await (const list of muxer.source) {
      if (socket.destroyed) break;
      if (socket.write(list.subarray())) continue;
      await new Promise((resolve) => socket.once("drain", resolve).once("close", resolve));
    }
    socket.end();
  })();
  await muxer.sink(socket).catch(() => {});
  await writing.catch(() => {});
  console.log("over");
  process.exit(0);
}

const [role, address] = process.argv.slice(2);
const [host, port] = address.split(":");
process.on("uncaughtException", () => {});
if (role === "server") {
  const server = createServer((socket) => run(socket, "inbound"));
  server.listen(Number(port), host, () => console.log(server.address().port));
} else {
  const socket = connect(Number(port), host, () => run(socket, "outbound"));
}
