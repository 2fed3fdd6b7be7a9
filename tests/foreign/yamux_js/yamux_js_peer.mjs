// A peer for the tests of muxkit's yamux, with `yamux-js` from npm: it echoes each stream, and opens one itself.
//
//   node yamux_js_peer.mjs client|server HOST:PORT
//
// yamux-js 0.2.0 parses each chunk of the transport as if it began with a frame and held all of it, and it drops the
// payload of a frame with SYN. So `whole` gives it one frame at a time, and a SYN of its own. It never reports a FIN.

import { Buffer } from "node:buffer";
import { connect, createServer } from "node:net";
import { Client, Server } from "yamux-js";

const HEADER = 12;
const DATA = 0;
const SYN = 1;

function whole(session) {
  let rest = Buffer.alloc(0);
  return (bytes) => {
    rest = Buffer.concat([rest, bytes]);
    while (rest.length >= HEADER) {
      const size = rest[1] === DATA ? rest.readUInt32BE(8) : 0;
      if (rest.length < HEADER + size) return;
      const frame = Buffer.from(rest.subarray(0, HEADER + size));
      rest = rest.subarray(HEADER + size);
      if (frame[1] === DATA && frame.readUInt16BE(2) === SYN) {
        const opening = Buffer.from(frame.subarray(0, HEADER));
        opening[1] = 1; // a window update of 0 bytes, with the SYN
        opening.writeUInt32BE(0, 8);
        session.write(opening);
        frame.writeUInt16BE(0, 2);
      }
      session.write(frame);
    }
  };
}

function run(socket, role) {
  const config = { enableKeepAlive: false, logger: () => {} };
  const echo = (stream) => {
    stream.on("data", (bytes) => stream.write(bytes));
    stream.on("error", () => {});
  };
  const session = role === "client" ? new Client(config) : new Server(echo, config);
  if (role === "client") session.onStream = echo;
  session.on("data", (bytes) => socket.write(bytes));
  session.on("error", () => {});
  socket.on("data", whole(session));
  socket.on("error", () => {});
  socket.on("end", () => {
    console.log("over");
    process.exit(0);
  });
  const call = session.open();
  call.on("error", () => {});
  call.on("data", (bytes) => console.log(`came back: ${bytes}`));
  call.write("hello from yamux-js");
}

const [role, address] = process.argv.slice(2);
const [host, port] = address.split(":");
if (role === "server") {
  const server = createServer((socket) => run(socket, role));
  server.listen(Number(port), host, () => console.log(server.address().port));
} else {
  const socket = connect(Number(port), host, () => run(socket, role));
}
