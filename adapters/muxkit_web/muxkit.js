/**
 * A bpmux client for browsers and Node, over one WebSocket.
 *
 * A session carries many channels over a single WebSocket connection. Each channel is a pair of WHATWG streams, and each
 * has its own flow control: the server's window limits how much you can write, and what you haven't read limits how much
 * the server can send. A channel that nobody reads therefore never holds up the others, and never fills the memory.
 *
 *     import { connect } from "./muxkit.js";
 *
 *     const session = await connect("wss://example.org/mux");
 *     const channel = await session.open("echo");
 *     await channel.send("hello");
 *     for await (const message of channel) console.log(new TextDecoder().decode(message));
 *
 * The module has no dependencies. From bottom to top it consists of:
 *
 * - the codec: numbers and chunks, as docs/reference/bpmux.md describes them
 * - `ChunkReader`, which splits received bytes into chunks, wherever they were cut
 * - `Engine`, which knows the rules of the protocol and neither sockets nor streams
 * - the halves, which turn the engine's messages into readable and writable streams
 * - `Session`, which runs an engine over a WebSocket
 * - `connect` and `reconnecting`
 *
 * `muxkit.d.ts` next to this file declares the types of everything public.
 */

// ------------------------------------------------------------------------------------------------------------ errors

/** The base class of all errors of this module. */
export class MuxError extends Error {
  get name() {
    return this.constructor.name;
  }
}

/**
 * The connection is over. `by` says which side ended it ("local", "peer" or "network"), `reason` and `code` are the
 * peer's own words, if it gave any.
 */
export class LinkLost extends MuxError {
  constructor(message, { by = "network", reason = "", code = 0, cause } = {}) {
    const said = reason ? `: ${reason}` : "";
    super(`${message}${said}${code ? ` (code ${code})` : ""}`, cause === undefined ? undefined : { cause });
    this.by = by;
    this.reason = reason;
    this.code = code;
  }
}

/** The server refused this client, for example because it doesn't accept the token. */
export class Refused extends MuxError {
  constructor(reason, code = 0) {
    super(`the server refused this client: ${reason}${code ? ` (code ${code})` : ""}`);
    this.reason = reason;
    this.code = code;
  }
}

class ChannelError extends MuxError {
  constructor(message, payload = EMPTY) {
    const { text, code } = decodeReason(payload);
    super(`${message}${text ? `: ${text}` : ""}${code ? ` (code ${code})` : ""}`);
    this.reason = text;
    this.code = code;
    this.payload = payload;
  }
}

/** The peer gave up on a channel before it had sent everything. Some messages are missing. */
export class ChannelCancelled extends ChannelError {}

/** The peer doesn't receive on this channel any more, or it declined a request. */
export class ChannelStopped extends ChannelError {}

/** The peer broke a rule of the protocol, or exceeded one of our limits. `rule` is the number of the clause. */
export class ProtocolError extends MuxError {
  constructor(message, rule = "") {
    super(`${message}${rule ? ` [${rule}]` : ""}`);
    this.rule = rule;
  }
}

// ------------------------------------------------------------------------------------------------------------- codec

const EMPTY = new Uint8Array(0);
const U64_MAX = 2n ** 64n - 1n;

/** The three high bits of a chunk's tag: the kind of entity, seen from the sender of the chunk. */
const Type = Object.freeze({
  OUT_REQUEST: 0,
  IN_REQUEST: 1,
  OUT_SINK: 2,
  IN_SINK: 3,
  OUT_STREAM: 4,
  IN_STREAM: 5,
  DUPLEX: 6,
  PARTIAL: 7,
});
const LABELS = Object.keys(Type).map((name) => name.toLowerCase().replace("_", "-"));

const PAYLOAD = 0x10;
const CREDIT = 0x08;
const PING = 0x04;
const END = 0x02;
const ACK_END = 0x01;

// Identifiers and credits have 64 bits. We keep them as Numbers while those are exact, and as BigInts above that, so each
// value has exactly one form and can be the key of a Map.
const normal = (value) => (value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : value);
const add = (a, b) =>
  typeof a === "number" && typeof b === "number" && a + b <= Number.MAX_SAFE_INTEGER
    ? a + b
    : normal(BigInt(a) + BigInt(b));
const subtract = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : normal(BigInt(a) - BigInt(b)));
const smaller = (size, credit) => (credit < size ? Number(credit) : size);

function bigEndian(value) {
  const bytes = [];
  for (let rest = BigInt(value); rest > 0n; rest >>= 8n) bytes.unshift(Number(rest & 0xffn));
  return bytes;
}

/** Return a VarU64: one byte up to 247, otherwise a byte that says how many big-endian bytes follow. */
function encodeNumber(value) {
  if (value < 248) return [Number(value)];
  const bytes = bigEndian(value);
  return [247 + bytes.length, ...bytes];
}

function head(type, id, flags) {
  return [(type << 5) | flags, ...encodeNumber(id)];
}

/** Return the chunk that announces a message of `total` bytes in parts. */
function encodePartial(total) {
  const bytes = bigEndian(total);
  return [(Type.PARTIAL << 5) | (bytes.length - 1), ...bytes];
}

/** Return a chunk as bytes; the fields that aren't there have no flag. */
function encodeChunk({ type, id, payload, credit, ping, end, ackEnd }) {
  const flags =
    (payload === undefined ? 0 : PAYLOAD) |
    (credit === undefined ? 0 : CREDIT) |
    (ping ? PING : 0) |
    (end === undefined ? 0 : END) |
    (ackEnd ? ACK_END : 0);
  const parts = [head(type, id, flags)];
  if (payload !== undefined) parts.push(encodeNumber(payload.length), payload);
  if (credit !== undefined) parts.push(encodeNumber(credit));
  if (end !== undefined) parts.push(encodeNumber(end.length), end);
  return join(parts);
}

function join(parts) {
  let size = 0;
  for (const part of parts) size += part.length;
  const joined = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

/** Accept a string, an ArrayBuffer or any view of one as a message; strings are sent as UTF-8. */
function toBytes(message) {
  if (typeof message === "string") return new TextEncoder().encode(message);
  if (message instanceof ArrayBuffer) return new Uint8Array(message);
  if (ArrayBuffer.isView(message)) return new Uint8Array(message.buffer, message.byteOffset, message.byteLength);
  throw new TypeError(`invalid message: expected a string, an ArrayBuffer or a typed array, got ${typeof message}`);
}

// Reasons and names. bpmux leaves the bytes of an end payload and of an opening to the application; muxkit writes a
// reason as UTF-8 text with an optional number in front, and a name between the bytes C0 6E and a NUL.

const REASON_MAX = 512; // bytes
const NAME_MAX = 255; // bytes
const HEADERS_MAX = 65_535; // bytes
const CODE_MAX = 2 ** 32 - 1;
const NO_REASON = Uint8Array.of(1); // an end payload that says that messages are missing, and nothing else
const NAMED = [0xc0, 0x6e]; // UTF-8 has no byte C0, so no text begins like this
const HEADED = [0xc0, 0x68]; // in front of a block of headers, which begins with its length

function encodeReason(text, code, max = REASON_MAX) {
  if (!Number.isInteger(code) || code < 0 || code > CODE_MAX) {
    throw new RangeError(`invalid code ${code}: expected a whole number from 0 to ${CODE_MAX}`);
  }
  if (!text && !code) return EMPTY;
  // A text that begins like a code would be read as one.
  const prefix = code || /^\d{1,10} /.test(text) ? `${code} ` : "";
  if (prefix.length > max) return EMPTY; // a code that is cut in two would be read as part of the text
  let bytes = new TextEncoder().encode(prefix + text);
  if (bytes.length > max) {
    let cut = Number(max);
    while (cut > 0 && (bytes[cut] & 0xc0) === 0x80) cut -= 1; // don't cut inside of a character
    bytes = bytes.slice(0, cut);
  }
  return bytes;
}

function decodeReason(payload) {
  const bytes = payload.subarray(0, REASON_MAX);
  if (bytes.every((byte) => byte < 32)) return { text: "", code: 0 };
  const text = new TextDecoder().decode(bytes);
  const found = /^(\d{1,10}) /.exec(text);
  if (found === null || Number(found[1]) > CODE_MAX) return { text: printable(text), code: 0 };
  return { text: printable(text.slice(found[0].length)), code: Number(found[1]) };
}

/** Replace control characters in a text of the peer, so that it can be shown. */
function printable(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
}

function reasonOf(reason) {
  if (reason instanceof MuxError) return { text: reason.reason || reason.message, code: reason.code || 0 };
  if (reason instanceof Error) return { text: reason.message, code: 0 };
  return { text: reason === undefined || reason === null ? "" : String(reason), code: 0 };
}

const begins = (payload, mark) => payload[0] === mark[0] && payload[1] === mark[1];

function withName(name, payload, headers = {}) {
  if (begins(payload, HEADED)) payload = join([HEADED, [0, 0], payload]); // or its first bytes would be read as headers
  payload = withHeaders(headers, payload);
  if (!name && !begins(payload, NAMED)) return payload;
  const bytes = new TextEncoder().encode(name);
  if (bytes.length > NAME_MAX || bytes.includes(0)) {
    throw new RangeError(`invalid channel name: expected at most ${NAME_MAX} bytes without NUL, got ${bytes.length}`);
  }
  return join([NAMED, bytes, [0], payload]);
}

function withoutName(opening) {
  const end = opening.indexOf(0, NAMED.length);
  const parts = (name, rest) => ({ name, headers: headersOf(rest), payload: withoutHeaders(rest) });
  if (!begins(opening, NAMED) || end < 0) return parts("", opening);
  const name = new TextDecoder().decode(opening.subarray(NAMED.length, Math.min(end, NAMED.length + NAME_MAX)));
  return parts(printable(name), opening.subarray(end + 1));
}

/** Return the length of the block of headers in front of a payload; 0 if there is none, or it is cut off. */
function lengthOfHeaders(payload) {
  if (!begins(payload, HEADED)) return 0;
  const behind = 4 + (payload[2] << 8) + payload[3];
  return behind <= payload.length ? behind : 0;
}

const withoutHeaders = (payload) => payload.subarray(lengthOfHeaders(payload));

/** Put a block of headers in front of a payload: one MessagePack map of strings to strings. */
function withHeaders(headers, payload) {
  const pairs = Object.entries(headers);
  if (!pairs.length) return payload;
  const parts = [[0xde, pairs.length >> 8, pairs.length & 0xff]];
  for (const text of pairs.flat()) {
    if (typeof text !== "string") throw new TypeError(`invalid header ${text}: expected a string`);
    const bytes = new TextEncoder().encode(text);
    parts.push([0xda, bytes.length >> 8, bytes.length & 0xff], bytes);
  }
  const block = join(parts);
  if (block.length > HEADERS_MAX) throw new RangeError(`headers of ${block.length} bytes: at most ${HEADERS_MAX}`);
  return join([HEADED, [block.length >> 8, block.length & 0xff], block, payload]);
}

/** Read the block of headers in front of a payload. A block that isn't a map of strings has no headers. */
function headersOf(payload) {
  const block = payload.subarray(4, Math.max(4, lengthOfHeaders(payload)));
  const headers = Object.create(null);
  let at = 0;
  const size = (bytes) => {
    let value = 0;
    for (let left = bytes; left > 0; left -= 1) value = value * 256 + (block[at++] ?? NaN);
    return value;
  };
  const tag = block[at++];
  let pairs = tag >= 0x80 && tag <= 0x8f ? tag & 0x0f : tag === 0xde ? size(2) : tag === 0xdf ? size(4) : 0;
  const text = () => {
    const kind = block[at++];
    const length = kind >= 0xa0 && kind <= 0xbf ? kind & 0x1f : kind >= 0xd9 && kind <= 0xdb ? size(2 ** (kind - 0xd9)) : NaN;
    at += length;
    return at <= block.length ? new TextDecoder().decode(block.subarray(at - length, at)) : null;
  };
  for (; pairs > 0; pairs -= 1) {
    const key = text();
    const value = text();
    if (key === null || value === null) return Object.create(null);
    headers[key] = value;
  }
  return headers;
}

// ------------------------------------------------------------------------------------------------------ chunk reader

/** Accepts every chunk that can be parsed; `Engine` overrides what has rules. */
class Checks {
  partial(total) {}
  header(type, id, flags) {}
  payload(size) {}
  credit(amount) {}
  end(size) {}
  apply(chunk) {}
}

const MISSING = Symbol("more bytes are needed");

/**
 * Splits received bytes into chunks and calls a `Checks` with each field as soon as it is known, then `apply` with the
 * whole chunk.
 *
 * The bytes of a payload go straight into an array of its size. That is safe because `checks.payload` has refused sizes
 * beyond the credit that we granted. Everything else in a chunk takes at most 19 bytes, and is parsed again from the
 * start when it was cut.
 */
class ChunkReader {
  #checks;
  #held = EMPTY;
  #bytes = EMPTY;
  #at = 0;
  #chunk = null;
  #step = "head";
  #filled = 0;

  constructor(checks) {
    this.#checks = checks;
  }

  /** True while the input ends inside of a chunk. */
  get isInsideChunk() {
    return this.#held.length > 0 || this.#chunk !== null;
  }

  receive(data) {
    this.#bytes = this.#held.length ? join([this.#held, data]) : data;
    this.#held = EMPTY;
    this.#at = 0;
    while (this.#at < this.#bytes.length || this.#isComplete()) {
      const before = this.#at;
      if (this[`_${this.#step}`]() === MISSING) {
        this.#held = this.#bytes.slice(before);
        break;
      }
    }
    this.#bytes = EMPTY;
  }

  /** Return true if the current step needs no bytes: an empty payload ends a chunk without any. */
  #isComplete() {
    if (this.#step === "payload") return this.#filled === this.#chunk.payload.length;
    if (this.#step === "endPayload") return this.#filled === this.#chunk.end.length;
    return this.#step === "apply";
  }

  #number() {
    const first = this.#bytes[this.#at];
    if (first === undefined) return MISSING;
    if (first < 248) {
      this.#at += 1;
      return first;
    }
    const count = first - 247;
    if (this.#bytes.length - this.#at <= count) return MISSING;
    let value = 0n;
    for (let index = 1; index <= count; index++) value = (value << 8n) | BigInt(this.#bytes[this.#at + index]);
    if (value < 248n || (count > 1 && value < 1n << BigInt(8 * (count - 1)))) {
      throw new ProtocolError(`invalid number: ${value} was sent in ${count + 1} bytes, longer than needed`, "bpmux-G12");
    }
    this.#at += count + 1;
    return normal(value);
  }

  _head() {
    const begin = this.#at;
    const tag = this.#bytes[this.#at++];
    const type = tag >> 5;
    if (type === Type.PARTIAL) return this.#partial((tag & 7) + 1);
    const flags = tag & 0x1f;
    const id = this.#number();
    if (id === MISSING) return this.#back(begin);
    const size = flags & PAYLOAD ? this.#number() : 0;
    if (size === MISSING) return this.#back(begin);
    this.#checks.header(type, id, flags);
    this.#chunk = { type, id, flags };
    if (flags & PING) this.#chunk.ping = true;
    if (flags & ACK_END) this.#chunk.ackEnd = true;
    if (flags & PAYLOAD) {
      this.#checks.payload(size);
      this.#chunk.payload = new Uint8Array(size);
      this.#filled = 0;
      this.#step = "payload";
    } else {
      this.#step = flags & CREDIT ? "credit" : flags & END ? "end" : "apply";
    }
  }

  #partial(count) {
    if (this.#bytes.length - this.#at < count) {
      this.#at -= 1;
      return MISSING;
    }
    let total = 0n;
    for (let index = 0; index < count; index++) total = (total << 8n) | BigInt(this.#bytes[this.#at + index]);
    if (this.#bytes[this.#at] === 0) {
      const rule = count === 1 ? "bpmux-P04" : "bpmux-P05";
      throw new ProtocolError(`invalid total size of a message in parts: ${total} in ${count} bytes`, rule);
    }
    this.#at += count;
    this.#checks.partial(normal(total));
    this.#checks.apply({ type: Type.PARTIAL, total: normal(total) });
  }

  _payload() {
    if (this.#fill(this.#chunk.payload)) {
      this.#step = this.#chunk.flags & CREDIT ? "credit" : this.#chunk.flags & END ? "end" : "apply";
    }
  }

  _credit() {
    const credit = this.#number();
    if (credit === MISSING) return MISSING;
    this.#checks.credit(credit);
    this.#chunk.credit = credit;
    this.#step = this.#chunk.flags & END ? "end" : "apply";
  }

  _end() {
    const size = this.#number();
    if (size === MISSING) return MISSING;
    this.#checks.end(size);
    this.#chunk.end = new Uint8Array(size);
    this.#filled = 0;
    this.#step = "endPayload";
  }

  _endPayload() {
    if (this.#fill(this.#chunk.end)) this.#step = "apply";
  }

  _apply() {
    const chunk = this.#chunk;
    this.#chunk = null;
    this.#step = "head";
    this.#checks.apply(chunk);
  }

  #fill(target) {
    const size = Math.min(target.length - this.#filled, this.#bytes.length - this.#at);
    target.set(this.#bytes.subarray(this.#at, this.#at + size), this.#filled);
    this.#filled += size;
    this.#at += size;
    return this.#filled === target.length;
  }

  #back(begin) {
    this.#at = begin;
    return MISSING;
  }
}

// ------------------------------------------------------------------------------------------------------------ engine

/** The six maps of the document. The number is the type of the chunks that we send about such an entity. */
const Kind = Object.freeze({ REQUEST_OUT: 0, REQUEST_IN: 1, SINK_OUT: 2, SINK_IN: 3, STREAM_OUT: 4, STREAM_IN: 5 });

/** The table under "Receiving Chunks": the map that a received chunk type addresses. */
const ADDRESSED = [
  Kind.REQUEST_IN,
  Kind.REQUEST_OUT,
  Kind.STREAM_IN,
  Kind.STREAM_OUT,
  Kind.SINK_IN,
  Kind.SINK_OUT,
  Kind.SINK_IN, // Duplex: this map and STREAM_IN
];
const receives = (kind) => kind === Kind.REQUEST_OUT || kind === Kind.STREAM_OUT || kind === Kind.STREAM_IN;
const isOurs = (kind) => kind === Kind.REQUEST_OUT || kind === Kind.SINK_OUT || kind === Kind.STREAM_OUT;
const isCreating = (type) =>
  type === Type.OUT_REQUEST || type === Type.OUT_SINK || type === Type.OUT_STREAM || type === Type.DUPLEX;

const PIECE = 32 * 1024; // bytes of one payload chunk, so that a large message lets others through between its parts
const TURN = 64 * 1024; // bytes that one entity may write before it is the next one's turn

/**
 * What we granted the peer on one entity, and what arrived and wasn't consumed.
 *
 * `credit` is what the peer may still send, `held` what arrived and waits for the application. Once half of the window is
 * free, it is granted again. `lent` was granted beyond the window, so that a message larger than the window can arrive as
 * a whole; consuming repays it. `unfinished` is what messages in parts still need.
 */
class Window {
  credit = 0;
  held = 0;
  lent = 0;
  unfinished = 0;
  renews = true;

  constructor(size) {
    this.size = size;
  }

  /** Count bytes as consumed; return what to grant now, and what was repaid of the loans. */
  consumed(amount) {
    this.held -= amount;
    const repaid = Math.min(this.lent, amount);
    this.lent -= repaid;
    const own = this.credit + this.held - this.lent;
    if (!this.renews || 2 * own > this.size) return { grant: 0, repaid };
    this.credit += this.size - own;
    return { grant: this.size - own, repaid };
  }

  get shortfall() {
    return Math.max(0, this.unfinished - this.credit);
  }
}

/** One half of a channel, or a request: payload in one direction, credit and ends in both. */
class Entity {
  credit = 0; // what we may still send
  wanted = true; // false: discard what arrives
  endSent = false;
  gone = false;
  twin = null; // the other half of a duplex, while both are alive
  half = null; // what the application holds of it
  // A message that arrives in parts.
  opening = false; // its opening payload hasn't arrived as a whole
  partial = 0; // bytes that are missing
  parts = null; // the pieces
  partsAreEnd = null;
  pinged = false; // a ping that came before its opening was complete
  // What waits to be written.
  announced = true; // its opening was written
  openingType = -1;
  queue = []; // messages; the first may be written in part
  queued = 0; // bytes in the queue and of the end payload
  begun = 0; // bytes of the first that were written
  end = null;
  aborting = false;
  reason = null; // of an abort: { text, code }, written in as many bytes as there is credit for
  grant = 0;
  pings = 0;
  pongs = 0;
  scheduled = false;

  constructor(kind, id, size) {
    this.kind = kind;
    this.id = id;
    this.window = new Window(receives(kind) ? size : 0);
    this.hasSent = false;
  }

  get receives() {
    return receives(this.kind);
  }

  get isTop() {
    return this.id === 0 && (this.kind === Kind.SINK_OUT || this.kind === Kind.STREAM_OUT);
  }

  /** The type of chunks about it. Both sides have the top level as an out-entity, and address it as the peer's. */
  get type() {
    return this.isTop ? this.kind + 1 : this.kind;
  }

  get ending() {
    return this.endSent || this.end !== null || (this.kind === Kind.REQUEST_IN && this.queue.length > 0);
  }

  get label() {
    return `${LABELS[this.type]} ${this.id}`;
  }
}

/**
 * The rules of bpmux/rel, without a socket and without a clock.
 *
 * Received bytes go into `receive`, which calls the `half` of the entity concerned, or the `session` for what the peer
 * opened. Commands queue what is to be written; `take` returns it. A violation is a `ProtocolError`, after which the
 * engine must not be used any more.
 *
 * An entity is removed as soon as its end was confirmed: by the peer's acknowledgement of our end, by our
 * acknowledgement of the peer's end, or because both ends crossed on their way.
 */
class Engine extends Checks {
  constructor(session, limits) {
    super();
    this.session = session;
    this.limits = limits;
    this.maps = Array.from({ length: 6 }, () => new Map());
    this.reader = new ChunkReader(this);
    this.acks = [];
    this.dirty = new Set(); // entities with grants, pings or pongs to write
    this.line = []; // entities with something else to write
    this.outbox = 0; // bytes that wait only for the socket
    this.lendable = limits.reassembly;
    this.borrowers = new Set();
    this.openings = new Set(); // entities whose opening isn't written
    this.unread = new Set(); // entities of the peer that are gone, with messages that the application hasn't read
    this.ours = 0;
    this.theirs = 0;
    this.announced = 0; // the total of the Partial chunk before this one
    this.nextId = 1;
    this.topSink = this.#add(Kind.SINK_OUT, 0);
    this.topStream = this.#add(Kind.STREAM_OUT, 0);
    this.#grantFirst(this.topStream);
  }

  // --- entities

  #add(kind, id) {
    const entity = new Entity(kind, id, this.limits.window);
    this.maps[kind].set(id, entity);
    return entity;
  }

  #count(entity, change) {
    if (isOurs(entity.kind)) this.ours += change;
    else this.theirs += change;
  }

  #grantFirst(entity) {
    entity.window.credit += entity.window.size;
    this.owe(entity, { grant: entity.window.size });
  }

  /** Remove an entity: nothing is sent or received on it any more. */
  #remove(entity) {
    this.maps[entity.kind].delete(entity.id);
    entity.gone = true;
    this.dirty.delete(entity);
    this.openings.delete(entity);
    this.borrowers.delete(entity);
    this.#dropParts(entity);
    const window = entity.window;
    const repaid = Math.max(0, window.lent - window.held);
    window.lent -= repaid;
    window.renews = false;
    if (window.held && !isOurs(entity.kind)) this.unread.add(entity);
    this.#drop(entity, 0);
    if (entity.twin !== null) {
      const twin = entity.twin;
      twin.twin = null;
      entity.twin = null;
      this.schedule(twin); // its end may have waited for this half
    } else if (!entity.isTop) {
      this.#count(entity, -1);
    }
    if (entity === this.topSink) this.#declineOpenings();
    this.#repay(repaid);
    this.session.entityGone(entity);
  }

  /** Drop the messages of an entity beyond the first `keep`, and the end after them. */
  #drop(entity, keep) {
    entity.queue.length = Math.min(keep, entity.queue.length);
    if (!entity.queue.length) entity.begun = 0;
    entity.end = null;
    const left = entity.queue.reduce((sum, message) => sum + message.length, 0) - entity.begun;
    this.#unqueue(entity, entity.queued - left);
  }

  #unqueue(entity, size) {
    entity.queued -= size;
    this.outbox -= size;
  }

  #declineOpenings() {
    for (const entity of [...this.openings]) {
      const halves = entity.twin === null ? [entity] : [entity, entity.twin];
      for (const half of halves) this.#remove(half);
      for (const half of halves) {
        half.half?.stopped(new ChannelStopped("no channel can be opened any more: the peer is closing the session"));
      }
    }
  }

  get channels() {
    return this.ours + this.theirs;
  }

  // --- receiving: the checks, which run while a chunk is parsed

  receive(data) {
    this.reader.receive(data);
  }

  partial(total) {
    if (this.announced) throw new ProtocolError("a Partial chunk follows a Partial chunk", "bpmux-P07");
    if (total > this.limits.message) {
      throw new ProtocolError(`a message of ${total} bytes exceeds the limit of ${this.limits.message}`, "bpmux-P17");
    }
  }

  header(type, id, flags) {
    const entity = this.maps[ADDRESSED[type]].get(id);
    const broken = (what, rule) => new ProtocolError(`${LABELS[type]} ${id}: ${what}`, rule);
    this.entity = entity;
    this.charged = 0;
    if (flags & ACK_END && flags !== ACK_END) {
      throw broken("ack-end together with other flags", entity === undefined ? "bpmux-R20" : "bpmux-R32");
    }
    if (entity === undefined) this.#checkNew(type, id, flags, broken);
    else this.#checkKnown(entity, type, flags, broken);
    this.payer = entity === undefined || entity.opening ? this.topStream : entity;
    this.left = this.announced || (entity === undefined ? 0 : entity.partial);
    if (flags & PAYLOAD && flags & END && this.left) {
      throw broken("payload and end payload in one chunk in partial mode", "bpmux-P14");
    }
    const { unfinished, credit } = this.payer.window;
    if (this.announced && unfinished + this.announced - credit > this.limits.reassembly) {
      throw broken("messages in parts exceed what may be put together at the same time", "");
    }
  }

  #checkNew(type, id, flags, broken) {
    if (id === 0 && type !== Type.OUT_REQUEST && type !== Type.IN_REQUEST) {
      const rule = type === Type.OUT_SINK || type === Type.OUT_STREAM ? "bpmux-S05" : "bpmux-R09";
      throw broken("the top level can't be opened again", rule);
    }
    if (type === Type.IN_REQUEST) throw broken("there is no such request", "bpmux-R10");
    if (!isCreating(type)) throw broken("there is no such entity, and only we could open it", "bpmux-R11");
    if (type === Type.DUPLEX && this.maps[Kind.STREAM_IN].has(id)) throw broken("the id is in use", "bpmux-R12");
    if (flags & ACK_END) throw broken("ack-end for an entity that doesn't exist", "bpmux-R20");
    if (!(flags & PAYLOAD)) throw broken("an opening without a payload", "bpmux-R14");
    if (this.theirs >= this.limits.channels) throw broken(`more than ${this.limits.channels} channels are open`, "");
  }

  #checkKnown(entity, type, flags, broken) {
    if (type === Type.DUPLEX && !(entity.opening && entity.twin !== null && flags & PAYLOAD)) {
      throw broken("the id is in use", entity.twin === null ? "bpmux-R12" : "bpmux-R21");
    }
    if (entity.opening && entity.twin !== null && type !== Type.DUPLEX && flags & PAYLOAD) {
      throw broken("parts of a duplex's opening travel as duplex chunks", "bpmux-P06");
    }
    if (flags & (PAYLOAD | END) && entity.twin?.opening) {
      throw broken("the opening of this duplex is incomplete", "bpmux-P06");
    }
    const carries = type === Type.IN_REQUEST || type === Type.IN_SINK || type === Type.OUT_SINK || entity.opening;
    if (flags & PAYLOAD && !carries) throw broken("chunks of this type carry no payload", "bpmux-R22");
    if (flags & PAYLOAD && flags & END && type === Type.IN_REQUEST) {
      throw broken("a response together with an end", "bpmux-R27");
    }
    if (flags & ACK_END && !entity.endSent) throw broken("ack-end for an end that wasn't sent", "bpmux-R33");
    if (entity.parts === null) return;
    if (this.announced) throw broken(`a Partial chunk while ${entity.partial} bytes are missing`, "bpmux-P08");
    if ((flags & END && entity.partsAreEnd === false) || (flags & PAYLOAD && entity.partsAreEnd === true)) {
      throw broken("payload and end payload mixed in partial mode", "bpmux-P14");
    }
  }

  payload(size) {
    const available = this.payer.window.credit;
    if (size > available) {
      const rule = this.payer === this.entity ? "bpmux-R23" : "bpmux-R15";
      throw new ProtocolError(`${this.entity?.label ?? "a new entity"}: ${size} bytes against ${available} granted`, rule);
    }
    this.#checkMessage(size);
    if (this.payer === this.entity) this.charged = size;
  }

  credit(amount) {
    const sum = add(this.entity?.credit ?? 0, amount);
    if (sum > U64_MAX) throw new ProtocolError(`credit of ${amount} makes ${sum}, above 2^64-1`, "bpmux-R25");
  }

  end(size) {
    const available = this.entity === undefined ? 0 : this.entity.window.credit - this.charged;
    if (size > available) {
      const rule = this.entity === undefined ? "bpmux-R18" : "bpmux-R29";
      throw new ProtocolError(`an end payload of ${size} bytes against ${available} granted`, rule);
    }
    this.#checkMessage(size);
  }

  #checkMessage(size) {
    if (this.left && size > this.left) {
      throw new ProtocolError(`${size} bytes in parts while ${this.left} of the total are missing`, "bpmux-P11");
    }
    if (size > this.limits.message) {
      throw new ProtocolError(`a message of ${size} bytes exceeds the limit of ${this.limits.message}`, "");
    }
  }

  // --- receiving: the effects of a complete chunk

  apply(chunk) {
    if (chunk.type === Type.PARTIAL) {
      this.announced = chunk.total;
      return;
    }
    const entity = this.entity ?? this.#create(chunk);
    const payer = entity.opening ? this.topStream : entity;
    if (this.announced) {
      entity.partial = this.announced;
      entity.parts = [];
      entity.partsAreEnd = null;
      if (entity.wanted) payer.window.unfinished += this.announced;
      this.announced = 0;
    }
    if (chunk.payload !== undefined) this.#takePayload(entity, chunk.payload);
    if (chunk.credit) this.#takeCredit(entity, chunk.credit);
    if (chunk.ping && !entity.endSent) this.owe(entity, { pongs: 1 });
    if (chunk.end !== undefined) this.#takeEnd(entity, chunk.end);
    if (chunk.ackEnd) {
      this.#remove(entity);
      entity.half?.confirmed();
    } else if (chunk.flags === 0) {
      this.session.ponged(entity);
    }
    this.#lend(payer);
  }

  #create(chunk) {
    const entity = this.#add(ADDRESSED[chunk.type], chunk.id);
    if (chunk.type === Type.DUPLEX) {
      entity.twin = this.#add(Kind.STREAM_IN, chunk.id);
      entity.twin.twin = entity;
    }
    entity.opening = true;
    this.#count(entity, 1);
    return entity;
  }

  #takePayload(entity, payload) {
    const window = (entity.opening ? this.topStream : entity).window;
    window.credit -= payload.length;
    window.held += payload.length;
    const message = this.#assembled(entity, payload, false);
    if (message === null) return;
    if (entity.opening) {
      entity.opening = false;
      const receiver = entity.receives ? entity : entity.twin;
      if (receiver !== null) this.#grantFirst(receiver);
      this.session.opened(entity, message);
    } else if (entity.kind === Kind.REQUEST_OUT) {
      this.consume(entity, message.length);
      this.#peerEnded(entity);
      entity.half?.responded(message);
    } else if (entity.wanted) {
      entity.half.message(message);
    } else {
      this.consume(entity, message.length);
    }
  }

  #takeCredit(entity, amount) {
    entity.credit = add(entity.credit, amount);
    this.schedule(entity);
    if (entity === this.topSink) for (const opening of this.openings) this.schedule(opening);
  }

  #takeEnd(entity, payload) {
    entity.window.credit -= payload.length;
    entity.window.held += payload.length;
    const message = this.#assembled(entity, payload, true);
    if (message === null) return;
    this.consume(entity, message.length);
    this.#peerEnded(entity);
    entity.half?.peerEnded(message);
  }

  #peerEnded(entity) {
    if (!entity.endSent) this.acks.push(head(entity.type, entity.id, ACK_END));
    this.#remove(entity);
  }

  /** Add a piece of a message in parts; return the message once it is complete, and null before. */
  #assembled(entity, payload, isEnd) {
    if (entity.parts === null) return payload;
    const payer = entity.opening ? this.topStream : entity;
    entity.partsAreEnd = isEnd;
    entity.partial -= payload.length;
    if (entity.wanted) {
      payer.window.unfinished -= payload.length;
      entity.parts.push(payload);
    } else {
      this.consume(payer, payload.length);
    }
    if (entity.partial) return null;
    const whole = entity.parts.length === 1 ? entity.parts[0] : join(entity.parts);
    entity.parts = null;
    return whole;
  }

  #dropParts(entity) {
    if (entity.parts === null || !entity.wanted) return;
    const payer = entity.opening ? this.topStream : entity;
    const size = entity.parts.reduce((sum, part) => sum + part.length, 0);
    payer.window.unfinished -= entity.partial;
    entity.parts = [];
    entity.wanted = false;
    this.consume(payer, size);
  }

  /** Discard from now on what arrives on an entity. */
  discard(entity) {
    if (!entity.wanted) return;
    this.#dropParts(entity);
    entity.wanted = false;
    entity.window.renews = false;
  }

  /** Count bytes of an entity's messages as taken by the application, or as discarded. */
  consume(entity, amount) {
    const { grant, repaid } = entity.window.consumed(amount);
    if (!entity.gone) this.owe(entity, { grant });
    else if (!entity.window.held) this.unread.delete(entity);
    this.#repay(repaid);
    this.#lend(entity);
  }

  // --- loans for messages larger than the window

  #lend(entity) {
    const need = entity.gone || entity.endSent ? 0 : entity.window.shortfall;
    if (need === 0) {
      this.borrowers.delete(entity);
    } else if (need <= this.lendable) {
      this.borrowers.delete(entity);
      this.lendable -= need;
      entity.window.lent += need;
      entity.window.credit += need;
      this.owe(entity, { grant: need });
    } else {
      this.borrowers.add(entity);
    }
  }

  #repay(amount) {
    if (!amount) return;
    this.lendable += amount;
    for (const borrower of [...this.borrowers]) this.#lend(borrower);
  }

  // --- commands

  #takeId(...kinds) {
    let id = this.nextId;
    while (kinds.some((kind) => this.maps[kind].has(id))) id += 1;
    this.nextId = id + 1;
    return id;
  }

  open(type, payload) {
    if (this.topSink.gone || this.topSink.ending) {
      throw new ChannelStopped("no channel can be opened any more: the session is closing");
    }
    if (payload.length > this.limits.message) this.#tooLarge(payload.length);
    const kinds = type === Type.DUPLEX ? [Kind.SINK_OUT, Kind.STREAM_OUT] : [type];
    const id = this.#takeId(...kinds);
    const entities = kinds.map((kind) => this.#add(kind, id));
    const [first, second = null] = entities;
    first.twin = second;
    if (second !== null) second.twin = first;
    for (const entity of entities) {
      entity.announced = false;
      if (entity.receives) this.#grantFirst(entity); // written with the opening
    }
    first.openingType = type;
    first.queue = [payload];
    first.queued = payload.length;
    this.outbox += payload.length;
    this.#count(first, 1);
    this.openings.add(first);
    this.schedule(first);
    return entities;
  }

  send(entity, message) {
    if (message.length > this.limits.message) this.#tooLarge(message.length);
    entity.queue.push(message);
    entity.queued += message.length;
    entity.hasSent = true;
    this.outbox += message.length;
    this.schedule(entity);
  }

  #tooLarge(size) {
    throw new RangeError(`invalid message: ${size} bytes exceed the limit of ${this.limits.message} (maxMessage)`);
  }

  /** End an entity: close one that we send on, or cancel one that the peer sends on. */
  finish(entity, payload = EMPTY) {
    if (entity.gone || entity.ending) return;
    entity.end = payload;
    entity.queued += payload.length;
    this.outbox += payload.length;
    if (entity.receives) this.discard(entity);
    this.schedule(entity);
  }

  /**
   * Drop the messages of which nothing was written, then end the entity. On an entity that we send on, the end has a
   * payload, which by convention means that messages are missing: as much of the reason as credit covers. It waits for at
   * least one byte of credit, because without it the peer would take the messages for complete.
   */
  abort(entity, text, code) {
    if (entity.gone || entity.endSent) return;
    entity.aborting = true;
    if (entity.announced) this.#drop(entity, entity.begun ? 1 : 0);
    if (entity.ending) return;
    if (entity.receives || (entity.kind === Kind.REQUEST_IN && !entity.credit)) return this.finish(entity);
    entity.reason = { text, code };
    this.finish(entity, NO_REASON);
  }

  /** End both halves of what the peer has just opened. The peer reads the reason if it gave credit for one. */
  decline(entity, text, code) {
    for (const half of [entity, entity.twin]) {
      if (half === null || half.gone || half.ending) continue;
      if (!half.receives && half.credit > 0) this.abort(half, text, code);
      else this.finish(half);
    }
  }

  owe(entity, { grant = 0, pings = 0, pongs = 0 }) {
    entity.grant += grant;
    entity.pings += pings;
    entity.pongs += pongs;
    if (entity.pongs > this.limits.pongs) throw new ProtocolError("too many pings wait for an answer");
    if (entity.announced && (entity.grant || entity.pings || entity.pongs)) {
      this.dirty.add(entity);
      this.session.wantsToWrite();
    }
  }

  ping(entity) {
    this.owe(entity, { pings: 1 });
  }

  // --- writing

  schedule(entity) {
    if (entity.scheduled || !this.#isReady(entity)) return;
    entity.scheduled = true;
    this.line.push(entity);
    this.session.wantsToWrite();
  }

  #isReady(entity) {
    if (entity.gone) return false;
    if (entity.openingType >= 0) {
      return entity.queue[0].length === entity.begun || this.topSink.credit > 0;
    }
    if (!entity.announced) return false;
    if (entity.queue.length) return entity.credit > 0 || entity.queue[0].length === 0;
    if (entity.end === null) return false;
    if (entity === this.topSink && this.openings.size) return false;
    // The end of the half that we send on goes first: the peer counts the other order as a cancellation.
    const twin = entity.twin;
    if (entity.receives && twin !== null && twin.end !== null && !(twin.aborting && !twin.credit)) return false;
    return entity.credit > 0 || entity.end.length === 0;
  }

  /** True while the peer owes a confirmation. Nobody waits for the end of what was given up. */
  get awaitsConfirmation() {
    return this.maps.some((map) => [...map.values()].some((entity) => !entity.aborting && !entity.twin?.aborting));
  }

  get hasOutput() {
    return this.acks.length > 0 || this.dirty.size > 0 || this.line.length > 0;
  }

  /** Return about `limit` bytes to write now. */
  take(limit = TURN) {
    const out = this.acks;
    this.acks = [];
    let size = 0;
    for (const entity of this.dirty) {
      if (out.length > limit / 16) break; // each of these is at most 11 bytes
      this.dirty.delete(entity);
      const type = entity.type;
      if (entity.grant) out.push(head(type, entity.id, CREDIT), encodeNumber(entity.grant));
      for (; entity.pings; entity.pings--) out.push(head(type, entity.id, PING));
      for (; entity.pongs; entity.pongs--) out.push(head(type, entity.id, 0));
      entity.grant = 0;
    }
    while (this.line.length && size < limit) {
      const entity = this.line.shift();
      entity.scheduled = false;
      if (!this.#isReady(entity)) continue;
      size += this.#write(entity, out);
      this.schedule(entity);
    }
    return join(out);
  }

  #write(entity, out) {
    let written = 0;
    if (entity.openingType >= 0) written += this.#writeOpening(entity, out);
    while (entity.announced && entity.queue.length && written < TURN) {
      const message = entity.queue[0];
      const size = this.#writePayload(entity, entity, head(entity.type, entity.id, PAYLOAD), message, out);
      if (size < 0) break;
      written += size + 1;
      if (entity.begun < message.length) continue;
      entity.queue.shift();
      entity.begun = 0;
      entity.half?.wrote();
      if (entity.kind === Kind.REQUEST_IN) entity.endSent = true; // a response ends its request
    }
    if (entity.end !== null && !entity.queue.length && this.#isReady(entity)) written += this.#writeEnd(entity, out);
    return written;
  }

  /** Write the next piece of a payload; return its size, or -1 if there is no credit for it. */
  #writePayload(entity, payer, start, message, out) {
    const left = message.length - entity.begun;
    const size = smaller(Math.min(left, PIECE), payer.credit);
    if (!size && left) return -1;
    if (size < left && !entity.begun) out.push(encodePartial(message.length));
    out.push(start, encodeNumber(size), message.subarray(entity.begun, entity.begun + size));
    entity.begun += size;
    payer.credit = subtract(payer.credit, size);
    this.#unqueue(entity, size);
    return size;
  }

  #writeOpening(entity, out) {
    const payload = entity.queue[0];
    const receiver = entity.receives ? entity : entity.twin;
    const isFirst = entity.begun === 0;
    const grant = isFirst && receiver !== null ? receiver.grant : 0;
    const start = head(entity.openingType, entity.id, PAYLOAD | (grant ? CREDIT : 0));
    const size = this.#writePayload(entity, this.topSink, start, payload, out);
    if (size < 0) return 0;
    if (grant) {
      out.push(encodeNumber(grant));
      receiver.grant = 0;
    }
    if (entity.begun < payload.length) return size + 1;
    entity.queue.shift();
    entity.begun = 0;
    entity.openingType = -1;
    this.openings.delete(entity);
    for (const half of [entity, entity.twin]) {
      if (half === null) continue;
      half.announced = true;
      this.owe(half, {});
      this.schedule(half);
    }
    if (!this.openings.size) this.schedule(this.topSink);
    entity.half?.opened?.();
    return size + 1;
  }

  #writeEnd(entity, out) {
    if (entity.reason !== null && !entity.begun) {
      const told = encodeReason(entity.reason.text, entity.reason.code, smaller(REASON_MAX, entity.credit));
      this.#unqueue(entity, entity.end.length - (told.length || 1));
      entity.end = told.length ? told : NO_REASON;
    }
    const payload = entity.end;
    const left = payload.length - entity.begun;
    const size = smaller(left, entity.credit);
    if (size < left && !entity.begun) out.push(encodePartial(payload.length));
    out.push(head(entity.type, entity.id, END), encodeNumber(size), payload.subarray(entity.begun, entity.begun + size));
    entity.begun += size;
    entity.credit = subtract(entity.credit, size);
    this.#unqueue(entity, size);
    if (entity.begun === payload.length) {
      entity.end = null;
      entity.begun = 0;
      entity.endSent = true;
      this.dirty.delete(entity);
      entity.grant = entity.pings = entity.pongs = 0;
      this.borrowers.delete(entity);
      if (entity.twin !== null) this.schedule(entity.twin);
    }
    return size + 1;
  }
}

// ----------------------------------------------------------------------------------------------------------- mailbox

const PACK = 4096; // bytes of one block of short messages
const SHORT = 64; // messages below this size are packed

/**
 * Messages that arrived and weren't read.
 *
 * Credit counts bytes, but an object of the engine costs more than a short message. So short messages lie behind each
 * other in blocks, each with its length in front, and a run of empty messages, which cost no credit at all, is a number.
 */
class Mailbox {
  #items = [];
  #first = 0; // index of the first item that is left

  get isEmpty() {
    return this.#first === this.#items.length;
  }

  put(message) {
    const last = this.isEmpty ? undefined : this.#items[this.#items.length - 1];
    if (message.length === 0) {
      if (last?.empties) last.empties += 1;
      else this.#items.push({ empties: 1 });
    } else if (message.length >= SHORT) {
      this.#items.push(message);
    } else {
      let pack = last?.block && last.end + message.length < PACK ? last : null;
      if (pack === null) {
        pack = { block: new Uint8Array(last?.block ? PACK : 256), at: 0, end: 0 };
        this.#items.push(pack);
      }
      if (pack.end + message.length >= pack.block.length) {
        const larger = new Uint8Array(PACK);
        larger.set(pack.block);
        pack.block = larger;
      }
      pack.block[pack.end] = message.length;
      pack.block.set(message, pack.end + 1);
      pack.end += message.length + 1;
    }
  }

  take() {
    const item = this.#items[this.#first];
    if (item instanceof Uint8Array) {
      this.#next();
      return item;
    }
    if (item.empties) {
      item.empties -= 1;
      if (!item.empties) this.#next();
      return new Uint8Array(0);
    }
    const size = item.block[item.at];
    const message = item.block.slice(item.at + 1, item.at + 1 + size);
    item.at += size + 1;
    if (item.at === item.end) this.#next();
    return message;
  }

  #next() {
    this.#items[this.#first++] = undefined;
    if (this.#first === this.#items.length || this.#first > 1024) {
      this.#items.splice(0, this.#first);
      this.#first = 0;
    }
  }

  clear() {
    this.#items = [];
    this.#first = 0;
  }
}

// ------------------------------------------------------------------------------------------------------------ halves

const OUTBOX = 256 * 1024; // bytes that wait for the socket, above which a write waits too

function deferred() {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  made.promise.catch(() => {}); // whoever waits for it sees the error
  return made;
}

/**
 * The sending half of a channel: a WritableStream whose back-pressure is the peer's window.
 *
 * A write is done as soon as the peer's credit covers it, so small messages don't wait for each other. Otherwise it is
 * done when the message was handed to the WebSocket. `close` is done when the peer has confirmed that it received
 * everything.
 */
class SendHalf {
  #controller;
  #waiting = null; // the write that waits for credit, or for the socket
  #closing = null;
  #error = null; // why nothing can be sent any more

  constructor(engine, entity) {
    this.engine = engine;
    this.entity = entity;
    this.source = null; // the other half of a duplex
    entity.half = this;
    this.writable = new WritableStream(
      {
        start: (controller) => {
          this.#controller = controller;
          // `abort` below isn't called while a write is under way, and that may wait for credit which never comes.
          controller.signal.addEventListener("abort", () => this.#abort(controller.signal.reason));
        },
        write: (message) => this.#write(message),
        close: () => this.#close(),
        abort: (reason) => this.#abort(reason),
      },
      {
        highWaterMark: 16 * 1024,
        size: (message) => 16 + (typeof message === "string" ? message.length : (message?.byteLength ?? 0)),
      },
    );
  }

  get error() {
    return this.#error;
  }

  #write(message) {
    const { engine, entity } = this;
    if (this.#error === null && entity.ending) this.#error = closedHere();
    if (this.#error !== null) throw this.#error;
    try {
      const bytes = toBytes(message);
      engine.send(entity, typeof message === "string" ? bytes : bytes.slice()); // the caller may change what it gave
    } catch (error) {
      this.#abort(error); // the stream is in error after this, so nothing else can follow
      throw error;
    }
    if (entity.queued <= entity.credit && engine.outbox <= OUTBOX) return undefined;
    this.#waiting = deferred();
    return this.#waiting.promise;
  }

  #close() {
    if (this.#error !== null) throw this.#error;
    this.#closing = deferred();
    this.engine.finish(this.entity);
    return this.#closing.promise;
  }

  #abort(reason) {
    if (this.#error !== null) return;
    this.#error = reason instanceof Error ? reason : closedHere();
    const { text, code } = reasonOf(reason);
    this.engine.abort(this.entity, text, code);
    this.#waiting?.resolve();
    this.#waiting = null;
  }

  /** Give up on what wasn't sent; the peer reads the reason. */
  abort(reason) {
    if (this.#error !== null) return;
    this.#abort(reason);
    this.#controller.error(this.#error);
  }

  /** Called by the engine when a message was written completely. */
  wrote() {
    if (this.#waiting !== null && this.entity.queue.length === 0) {
      this.#waiting.resolve();
      this.#waiting = null;
    }
  }

  /** Called by the engine when the peer has confirmed our end. */
  confirmed() {
    if (this.#closing !== null) {
      this.#error ??= closedHere();
      this.#closing.resolve();
      this.#closing = null;
    } else {
      this.stopped(closedHere());
    }
  }

  /** Called by the engine when the peer doesn't receive any more. */
  peerEnded(payload) {
    // The reason for which the peer gave up the whole channel came with the end of the other half.
    const told = payload.length ? payload : (this.source?.endPayload ?? EMPTY);
    this.stopped(new ChannelStopped("the peer stopped receiving on this channel", told));
  }

  /** Called when nothing can be sent any more. */
  stopped(error) {
    if (this.#error !== null) return;
    this.#error = error;
    this.#controller.error(error);
    this.#waiting?.reject(error);
    this.#closing?.reject(error);
    this.#waiting = this.#closing = null;
  }
}

function closedHere() {
  return new LinkLost("this was closed on our side", { by: "local" });
}

/** The receiving half of a channel: a ReadableStream; what isn't read isn't granted to the peer again. */
class ReceiveHalf {
  #controller;
  #mailbox = new Mailbox();
  #pull = null;
  #end = null; // how it ends behind the messages that are left: { error } or { error: null }
  #isOver = false;

  constructor(engine, entity) {
    this.engine = engine;
    this.entity = entity;
    this.endPayload = EMPTY;
    entity.half = this;
    this.readable = new ReadableStream(
      {
        start: (controller) => {
          this.#controller = controller;
        },
        pull: () => this.#read(),
        cancel: () => this.#stop(),
      },
      { highWaterMark: 0 }, // read only what somebody asks for
    );
  }

  #read() {
    if (!this.#mailbox.isEmpty) {
      const message = this.#mailbox.take();
      this.#controller.enqueue(message);
      this.engine.consume(this.entity, message.length);
      this.#finishIfRead();
      return undefined;
    }
    this.#pull = deferred();
    return this.#pull.promise;
  }

  message(message) {
    if (this.#pull === null) {
      this.#mailbox.put(message);
      return;
    }
    const pull = this.#pull;
    this.#pull = null;
    this.#controller.enqueue(message);
    this.engine.consume(this.entity, message.length);
    pull.resolve();
  }

  #stop() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#mailbox.clear();
    this.#pull?.resolve();
    this.engine.finish(this.entity); // first, so that the messages that are dropped grant nothing
    this.engine.consume(this.entity, this.entity.window.held);
  }

  /** Receive nothing any more; the peer is told. */
  stop() {
    if (this.#isOver) return;
    this.#stop();
    this.#controller.close();
  }

  confirmed() {}

  /** Called by the engine when the peer sends nothing more; a payload means that messages are missing. */
  peerEnded(payload) {
    this.endPayload = payload;
    const error = new ChannelCancelled("the peer cancelled this channel", payload);
    this.#ended(payload.length ? error : null);
  }

  /** Called when nothing more will come. */
  stopped(error) {
    this.#ended(error);
  }

  #ended(error) {
    if (this.#isOver || this.#end !== null) return;
    this.#end = { error };
    this.#finishIfRead();
  }

  #finishIfRead() {
    if (this.#end === null || !this.#mailbox.isEmpty || this.#isOver) return;
    this.#isOver = true;
    if (this.#end.error === null) this.#controller.close();
    else this.#controller.error(this.#end.error);
    this.#pull?.resolve();
  }
}

/** The half that receives top-level messages. An end with a payload is the reason why the connection ends. */
class TopReceiveHalf extends ReceiveHalf {
  constructor(engine, entity, session) {
    super(engine, entity);
    this.session = session;
  }

  peerEnded(payload) {
    this.session.topEnded(payload);
  }
}

/**
 * A two-way channel: `readable` and `writable` are WHATWG streams of messages.
 *
 * Use either the streams, or the methods below, which take the locks of the streams when they are first called.
 */
export class Channel {
  #sink;
  #source;
  #reader = null;
  #writer = null;

  constructor(session, sink, source, opening) {
    this.session = session;
    this.#sink = sink;
    this.#source = source;
    sink.source = source;
    const { name, headers, payload } = withoutName(opening);
    /** The name for which it was opened. */
    this.name = name;
    /** The headers that came with the opening, by name. */
    this.headers = headers;
    /** The payload that came with the opening. */
    this.opening = payload;
  }

  get readable() {
    return this.#source.readable;
  }

  get writable() {
    return this.#sink.writable;
  }

  /** Send a message; waits for the peer's window. */
  async send(message) {
    if (typeof message !== "string") toBytes(message); // an invalid message must not end the channel
    this.#writer ??= this.writable.getWriter();
    await this.#writer.ready;
    await this.#writer.write(message);
  }

  /** Receive the next message; undefined after the last one. */
  async receive() {
    this.#reader ??= this.readable.getReader();
    const { value } = await this.#reader.read();
    return value;
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      const message = await this.receive();
      if (message === undefined) return;
      yield message;
    }
  }

  /** Send nothing more; resolves when the peer has received everything. You can go on receiving. */
  async finish() {
    this.#writer ??= this.writable.getWriter();
    try {
      await this.#writer.close();
    } catch (error) {
      throw this.#sink.error ?? error; // a stream that is over only says that it can't be closed
    }
  }

  /** Finish sending, and receive nothing more. */
  async close() {
    this.#writer ??= this.writable.getWriter();
    const finished = this.#writer.close().catch(() => {}); // it may be over already
    this.#source.stop();
    await finished;
  }

  /** Give up on the channel in both directions; the peer reads the reason. */
  abort(reason = "", { code = 0 } = {}) {
    encodeReason(reason, code); // raises for an invalid code
    const error = Object.assign(new MuxError(reason), { reason, code });
    this.#sink.abort(error);
    this.#source.stop();
  }

  /** Measure one round trip on this channel, in milliseconds. */
  ping() {
    const entity = this.#sink.entity.ending || this.#sink.entity.gone ? this.#source.entity : this.#sink.entity;
    return this.session._ping(entity);
  }
}

/** A request of ours, which the peer answers once. */
class OutgoingRequest {
  constructor(engine, entity, signal) {
    this.engine = engine;
    this.entity = entity;
    entity.half = this;
    this.answer = deferred();
    this.stop = () => {
      engine.finish(entity);
      this.answer.reject(signal.reason);
    };
    this.signal = signal;
    signal?.addEventListener("abort", this.stop, { once: true });
    this.answer.promise.catch(() => {}).then(() => signal?.removeEventListener("abort", this.stop));
  }

  wrote() {}
  confirmed() {}

  responded(message) {
    this.answer.resolve(message);
  }

  peerEnded(payload) {
    this.answer.reject(new ChannelStopped("the peer declined to answer this request", payload));
  }

  stopped(error) {
    this.answer.reject(error);
  }
}

/** A request of the peer. `signal` is aborted when the peer needs no response any more. */
export class IncomingRequest {
  #engine;
  #entity;
  #controller = new AbortController();
  #isAnswered = false;

  constructor(engine, entity, payload) {
    this.#engine = engine;
    this.#entity = entity;
    entity.half = this;
    this.payload = payload;
  }

  get signal() {
    return this.#controller.signal;
  }

  /** Send the response. */
  respond(message) {
    if (this.#isAnswered) throw new MuxError("this request was answered before");
    this.#isAnswered = true;
    if (this.#entity.gone || this.#entity.ending) return; // the peer needs it no more
    this.#engine.send(this.#entity, toBytes(message).slice());
  }

  /** Give no response; the peer reads the reason. */
  decline(reason = "", { code = 0 } = {}) {
    if (this.#isAnswered) throw new MuxError("this request was answered before");
    this.#isAnswered = true;
    this.#engine.abort(this.#entity, reason, code);
  }

  wrote() {}
  confirmed() {}

  peerEnded() {
    this.#controller.abort(new ChannelStopped("the peer needs no response any more"));
  }

  stopped(error) {
    this.#controller.abort(error);
  }
}

/** What the peer opened and the application hasn't taken yet: a ReadableStream of it. */
class Backlog {
  #controller;
  #items = [];
  #pull = null;
  #isOver = false;

  constructor(engine) {
    this.engine = engine;
    this.isClaimed = false;
    this.stream = new ReadableStream(
      {
        start: (controller) => {
          this.#controller = controller;
        },
        pull: () => {
          if (this.#items.length) return this.#give(this.#items.shift());
          if (this.#isOver) return undefined;
          this.#pull = deferred();
          return this.#pull.promise;
        },
        cancel: () => {
          this.#isOver = true;
          this.decline("nothing here takes this any more", NOT_TAKEN);
        },
      },
      { highWaterMark: 0 },
    );
  }

  get isOver() {
    return this.#isOver;
  }

  get length() {
    return this.#items.length;
  }

  put(item) {
    if (this.#pull === null) {
      this.#items.push(item);
      return;
    }
    const pull = this.#pull;
    this.#pull = null;
    this.#give(item);
    pull.resolve();
  }

  #give({ made, size }) {
    this.engine.consume(this.engine.topStream, size);
    this.#controller.enqueue(made);
    this.#closeIfEmpty();
  }

  decline(text, code) {
    for (const { entity, size } of this.#items.splice(0)) {
      this.engine.consume(this.engine.topStream, size);
      this.engine.decline(entity, text, code);
    }
  }

  end() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.#closeIfEmpty();
    this.#pull?.resolve();
  }

  #closeIfEmpty() {
    if (this.#isOver && !this.#items.length) this.#controller.close();
  }
}

// ----------------------------------------------------------------------------------------------------------- session

const NOT_TAKEN = 405;
const FULL = 503;
const BROKE_A_RULE = 400;
const LEFT = 10_000; // ms that something the peer opened waits for the application to ask for it
const BUFFERED = 256 * 1024; // bytes in the WebSocket, above which we write no more
const POLL = 5; // ms between looks at these bytes: a WebSocket has no event for it
const DONE = 1000;
const POLICY = 1008;
const LIMITS = { window: 256 * 1024, message: 16 * 1024 * 1024, channels: 4096, backlog: 1024, pongs: 65_536 };

/** A bpmux session over an open WebSocket; `connect` makes one. */
export class Session {
  #socket;
  #engine;
  #flushing = false;
  #poll = null;
  #pings = [];
  #slots = [];
  #lost = null;
  #closed = deferred();
  #draining = deferred();
  #heard = now();
  #keepalive;
  #keepaliveTimer = null;
  #probe = null; // when a keepalive ping was sent that hasn't been answered
  #leaving = null;
  #waitsForEnd = [];
  #top;
  #messages;
  #refusal = null; // the peer's own reason for the end of the connection

  constructor(socket, options = {}, held = []) {
    const limits = { ...LIMITS };
    if (options.window !== undefined) limits.window = positive("window", options.window);
    if (options.maxMessage !== undefined) limits.message = positive("maxMessage", options.maxMessage);
    limits.reassembly = 4 * limits.message;
    const keepalive = { interval: 20_000, timeout: 20_000, ...(options.keepalive ?? {}) };
    this.#keepalive = options.keepalive === null ? null : keepalive;
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    this.url = socket.url ?? "";
    this.#engine = new Engine(this, limits);
    this.#top = new SendHalf(this.#engine, this.#engine.topSink);
    this.#messages = new TopReceiveHalf(this.#engine, this.#engine.topStream, this);
    this._incoming = new Backlog(this.#engine);
    this._requests = new Backlog(this.#engine);
    this._sources = new Backlog(this.#engine);
    this._sinks = new Backlog(this.#engine);
    socket.onmessage = (event) => this.#received(event.data);
    socket.onclose = (event) => this.#socketClosed(event.code, event.reason);
    socket.onerror = () => {}; // `onclose` follows
    this.#setKeepalive();
    for (const data of held) this.#received(data);
    this.wantsToWrite();
  }

  /** Resolves when the session is over, with what ended it: null if both sides took leave in order. Never rejects. */
  get closed() {
    return this.#closed.promise;
  }

  /** Resolves when the peer takes no new channels any more, because it is about to end the session. */
  get draining() {
    return this.#draining.promise;
  }

  /** Why the session is over; null while it isn't. */
  get error() {
    return this.#lost;
  }

  // --- the top level: messages that belong to no channel

  get readable() {
    return this.#messages.readable;
  }

  get writable() {
    return this.#top.writable;
  }

  // --- opening

  /** Open a two-way channel; the peer chooses what to do by its name. Resolves when the opening was sent. */
  async open(name = "", { payload = EMPTY, headers = {} } = {}) {
    const opening = withName(name, toBytes(payload), headers);
    const [sink, stream] = await this.#open(Type.DUPLEX, opening);
    return new Channel(this, new SendHalf(this.#engine, sink), new ReceiveHalf(this.#engine, stream), opening);
  }

  /** Open a channel to send on; return its writable stream. */
  async openSink(payload = EMPTY) {
    const [entity] = await this.#open(Type.OUT_SINK, toBytes(payload));
    return new SendHalf(this.#engine, entity).writable;
  }

  /** Open a channel to receive from; return its readable stream. */
  async openSource(payload = EMPTY) {
    const [entity] = await this.#open(Type.OUT_STREAM, toBytes(payload));
    return new ReceiveHalf(this.#engine, entity).readable;
  }

  /** Send a request and wait for its response. Aborting the signal cancels the request at the peer. */
  async request(payload = EMPTY, { signal } = {}) {
    signal?.throwIfAborted();
    const [entity] = await this.#open(Type.OUT_REQUEST, toBytes(payload));
    const request = new OutgoingRequest(this.#engine, entity, signal);
    if (signal?.aborted) request.stop();
    return request.answer.promise;
  }

  async #open(type, payload) {
    while (this.#lost === null && this.#engine.ours >= this.#engine.limits.channels) {
      const slot = deferred();
      this.#slots.push(slot);
      await slot.promise;
    }
    this.#check();
    return this.#engine.open(type, payload.slice());
  }

  #check() {
    if (this.#lost !== null) throw this.#lost;
  }

  // --- what the peer opens

  /** The channels that the peer opens, as a ReadableStream. */
  get incoming() {
    return this.#claim(this._incoming);
  }

  /** The requests of the peer, as a ReadableStream of `IncomingRequest`. */
  get requests() {
    return this.#claim(this._requests);
  }

  /** The channels on which only the peer sends: `{ readable, opening }`. */
  get sources() {
    return this.#claim(this._sources);
  }

  /** The channels on which only we send: `{ writable, opening }`. */
  get sinks() {
    return this.#claim(this._sinks);
  }

  #claim(backlog) {
    backlog.isClaimed = true;
    return backlog.stream;
  }

  /** Called by the engine when the peer has opened something. */
  opened(entity, opening) {
    const engine = this.#engine;
    const backlog = this.#backlogOf(entity);
    const all = [this._incoming, this._requests, this._sources, this._sinks];
    const waiting = all.reduce((sum, each) => sum + each.length, 0);
    const isFull = waiting >= engine.limits.backlog || engine.unread.size >= engine.limits.channels;
    if (backlog.isOver || isFull) {
      engine.consume(engine.topStream, opening.length);
      engine.decline(entity, backlog.isOver ? "" : "too many channels are waiting to be accepted", backlog.isOver ? 0 : FULL);
      return;
    }
    const made = this.#make(entity, opening);
    backlog.put({ made, entity, size: opening.length });
    if (!backlog.isClaimed) this.#declineUnlessClaimed(backlog);
  }

  #backlogOf(entity) {
    if (entity.twin !== null) return this._incoming;
    if (entity.kind === Kind.REQUEST_IN) return this._requests;
    return entity.kind === Kind.STREAM_IN ? this._sources : this._sinks;
  }

  #make(entity, opening) {
    const engine = this.#engine;
    if (entity.twin !== null) {
      return new Channel(this, new SendHalf(engine, entity), new ReceiveHalf(engine, entity.twin), opening);
    }
    if (entity.kind === Kind.REQUEST_IN) return new IncomingRequest(engine, entity, opening);
    if (entity.kind === Kind.STREAM_IN) return { readable: new ReceiveHalf(engine, entity).readable, opening };
    return { writable: new SendHalf(engine, entity).writable, opening };
  }

  #declineUnlessClaimed(backlog) {
    const timer = setTimeout(() => {
      if (!backlog.isClaimed) backlog.decline("nothing here takes channels of this kind", NOT_TAKEN);
    }, LEFT);
    timer.unref?.(); // Node must not wait for it
  }

  // --- pings

  /** Measure one round trip, in milliseconds. */
  ping() {
    return this._ping(this.#engine.topStream.gone ? this.#engine.topSink : this.#engine.topStream);
  }

  _ping(entity) {
    if (this.#lost !== null) return Promise.reject(this.#lost);
    if (entity.gone || entity.ending) return Promise.reject(new ChannelStopped("the channel is over"));
    const ping = { entity, began: now(), answer: deferred() };
    this.#pings.push(ping);
    this.#engine.ping(entity);
    return ping.answer.promise;
  }

  ponged(entity) {
    const index = this.#pings.findIndex((ping) => ping.entity === entity);
    if (index < 0) return;
    const [ping] = this.#pings.splice(index, 1);
    ping.answer.resolve(now() - ping.began);
  }

  #setKeepalive() {
    if (this.#keepalive === null || this.#lost !== null) return;
    const { interval, timeout } = this.#keepalive;
    const due = (this.#probe === null ? this.#heard + interval : this.#probe + timeout) - now();
    this.#keepaliveTimer = setTimeout(() => this.#keepaliveDue(), Math.max(0, due));
    this.#keepaliveTimer.unref?.();
  }

  #keepaliveDue() {
    const { interval, timeout } = this.#keepalive;
    if (this.#probe !== null && this.#heard > this.#probe) this.#probe = null;
    if (this.#probe !== null && now() - this.#probe >= timeout) {
      this.#lose(new LinkLost(`no data from the peer for ${Math.round((now() - this.#heard) / 1000)} s`));
      this.#socket.close();
      return;
    }
    if (this.#probe === null && now() - this.#heard >= interval) {
      const entity = [this.#engine.topStream, this.#engine.topSink].find((each) => !each.gone && !each.ending);
      if (entity === undefined) this.#heard = now();
      else {
        this.#probe = now();
        this.#engine.ping(entity);
      }
    }
    this.#setKeepalive();
  }

  // --- the socket

  #received(data) {
    if (this.#lost !== null) return;
    this.#heard = now();
    if (typeof data === "string") {
      this.#violated(new ProtocolError("the server sent a text message: expected binary messages only"));
      return;
    }
    try {
      this.#engine.receive(new Uint8Array(data));
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      this.#violated(error);
      return;
    }
    this.#flush();
  }

  #violated(error) {
    const reason = new TextDecoder().decode(encodeReason(error.message, BROKE_A_RULE, 123));
    this.#lose(new LinkLost(error.message, { by: "peer", cause: error }));
    // Browsers let pages close with 1000 and with 3000 to 4999 only.
    this.#socket.close(3000 + BROKE_A_RULE, reason);
  }

  #socketClosed(code, text) {
    clearTimeout(this.#poll);
    if (this.#lost !== null) return;
    const { text: reason, code: number } = decodeReason(new TextEncoder().encode(text ?? ""));
    if (this.#leaving !== null && code === DONE && !this.#engine.awaitsConfirmation) {
      this.#lose(new LinkLost("the session was closed", { by: "local" }), null);
    } else if (code === DONE && !reason && this.#engine.channels === 0 && !this.#engine.reader.isInsideChunk) {
      this.#lose(new LinkLost("the peer hung up", { by: "peer" }), null);
    } else {
      const by = code === DONE || code === 1001 || code >= POLICY ? "peer" : "network";
      this.#lose(new LinkLost(`the WebSocket was closed with ${code}`, { by, reason, code: number }));
    }
  }

  #lose(error, told = error) {
    if (this.#lost !== null) return;
    this.#lost = this.#refusal ?? error;
    clearTimeout(this.#keepaliveTimer);
    clearTimeout(this.#poll);
    for (const map of this.#engine.maps) {
      for (const entity of map.values()) entity.half?.stopped(this.#lost);
    }
    for (const ping of this.#pings) ping.answer.reject(this.#lost);
    for (const slot of this.#slots.splice(0)) slot.resolve();
    this.#endBacklogs();
    this.#waitsForEnd.splice(0).forEach((each) => each.resolve());
    this.#closed.resolve(this.#refusal ?? told);
  }

  /** Called when the peer ended its top level. */
  topEnded(payload) {
    if (payload.length) {
      const { text, code } = decodeReason(payload);
      this.#refusal = new LinkLost("the peer ends the connection", { by: "peer", reason: text, code });
      this.#messages.stopped(this.#refusal);
    } else {
      this.#messages.stopped(null);
    }
    this.#endBacklogs();
  }

  #endBacklogs() {
    this.#draining.resolve();
    for (const backlog of [this._incoming, this._requests, this._sources, this._sinks]) backlog.end();
  }

  /** Called by the engine when an entity was removed. */
  entityGone(entity) {
    for (const ping of this.#pings.filter((each) => each.entity === entity)) {
      ping.answer.reject(new ChannelStopped("the channel ended before the answer to the ping arrived"));
    }
    this.#pings = this.#pings.filter((each) => each.entity !== entity);
    if (this.#engine?.topSink.gone) this.#draining.resolve();
    for (const slot of this.#slots.splice(0)) slot.resolve();
    if (this.#waitsForEnd.length && !this.#engine.awaitsConfirmation) {
      this.#waitsForEnd.splice(0).forEach((each) => each.resolve());
    }
  }

  /** Called by the engine when there may be something to write. Everything of one task goes out together. */
  wantsToWrite() {
    if (this.#flushing) return;
    this.#flushing = true;
    queueMicrotask(() => {
      this.#flushing = false;
      this.#flush();
    });
  }

  #flush() {
    const socket = this.#socket;
    while (this.#lost === null && this.#engine?.hasOutput && socket.readyState === 1) {
      if (socket.bufferedAmount > BUFFERED) {
        clearTimeout(this.#poll);
        this.#poll = setTimeout(() => this.#flush(), POLL);
        return;
      }
      const data = this.#engine.take();
      if (data.length) socket.send(data);
    }
  }

  // --- the end

  /**
   * Finish all channels, wait until the peer has confirmed that, and hang up. After `linger` milliseconds it hangs up
   * anyway.
   */
  async close({ linger = 5000 } = {}) {
    if (this.#lost !== null) return;
    if (this.#leaving === null) {
      this.#leaving = this.#leave(linger);
    }
    await this.#leaving;
  }

  async #leave(linger) {
    const engine = this.#engine;
    this.#endBacklogs();
    const order = [Kind.REQUEST_IN, Kind.SINK_OUT, Kind.SINK_IN, Kind.STREAM_OUT, Kind.STREAM_IN, Kind.REQUEST_OUT];
    for (const kind of order) {
      for (const entity of [...engine.maps[kind].values()]) {
        if (entity.half instanceof ReceiveHalf) entity.half.stop();
        else engine.finish(entity);
      }
    }
    const over = deferred();
    const timer = setTimeout(() => over.resolve(), linger);
    if (engine.awaitsConfirmation) {
      this.#waitsForEnd.push(over);
      await over.promise;
    }
    clearTimeout(timer);
    if (this.#lost !== null) return;
    this.#flush();
    this.#socket.close(DONE);
    const mute = new LinkLost(`the peer did not close the WebSocket within ${linger / 1000} s`);
    const late = setTimeout(() => this.#lose(mute), linger);
    await this.closed;
    clearTimeout(late);
  }

  /** End the session immediately; the peer reads the reason. */
  abort(reason = "", { code = 0 } = {}) {
    if (this.#lost !== null) return;
    const told = encodeReason(reason, code, 123);
    this.#lose(new LinkLost("the session was aborted here", { by: "local", reason, code }));
    this.#socket.close(3000, new TextDecoder().decode(told));
  }
}

function positive(name, value) {
  if (!Number.isInteger(value) || value <= 0) throw new RangeError(`invalid ${name}: expected bytes above 0, got ${value}`);
  return value;
}

function now() {
  return performance.now();
}

// ----------------------------------------------------------------------------------------------------------- connect

const TOKEN_MAX = 2048; // characters
const LINE_MAX = 4096; // bytes of the server's answer to a token

/** Accept muxkit's URLs (`bpmux+wss://…`), those of WebSockets, and in a page also paths of its own server. */
function resolve(url) {
  const text = String(url).replace(/^bpmux\+/, "");
  const resolved = new URL(text, globalThis.location?.href);
  resolved.protocol = resolved.protocol.replace(/^http/, "ws");
  if (resolved.protocol !== "ws:" && resolved.protocol !== "wss:") {
    throw new TypeError(`invalid URL ${url}: expected ws://host:port/path or wss://host:port/path`);
  }
  resolved.hash = "";
  return resolved.href;
}

function base64url(text) {
  const binary = Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_");
}

/**
 * Open a session with the server at `url`, such as `wss://example.org/mux`.
 *
 * Rejects with `LinkLost` if there is no connection, and with `Refused` if the server doesn't accept the token.
 */
export async function connect(url, options = {}) {
  const { token, protocols = [], signal, timeout = 30_000 } = options;
  const WebSocket = options.WebSocket ?? globalThis.WebSocket;
  if (WebSocket === undefined) {
    throw new MuxError(
      "there is no WebSocket: use Node 22, or node --experimental-websocket, or pass one as connect(url, { WebSocket })",
    );
  }
  if (token !== undefined && (!token || token.length > TOKEN_MAX)) {
    throw new RangeError(`invalid token: expected 1 to ${TOKEN_MAX} characters, got ${String(token).length}`);
  }
  signal?.throwIfAborted();
  const socket = new WebSocket(resolve(url), protocols);
  socket.binaryType = "arraybuffer";
  const outcome = deferred();
  const giveUp = () => outcome.reject(signal.reason);
  const timer = setTimeout(() => outcome.reject(new LinkLost(`no session within ${timeout / 1000} s`)), timeout);
  const held = []; // messages that come before the session listens
  let answer = token === undefined ? null : EMPTY; // the server's line about the token
  signal?.addEventListener("abort", giveUp, { once: true });
  // `onclose` follows with more facts, except in Node 20.
  socket.onerror = () => setTimeout(() => outcome.reject(closedEarly(socket.url, { code: 1006 })), 0);
  socket.onclose = (event) => outcome.reject(closedEarly(socket.url, event));
  socket.onopen = () => {
    if (token === undefined) outcome.resolve();
    else socket.send(new TextEncoder().encode(`muxkit 1 bpmux ${base64url(token)}\n`));
  };
  socket.onmessage = ({ data }) => {
    if (answer === null) {
      held.push(data);
      return;
    }
    answer = join([answer, new Uint8Array(data)]);
    const end = answer.indexOf(10);
    const begin = new TextDecoder().decode(answer.subarray(0, 3));
    const isAnswer = "ok\n".startsWith(begin) || "no ".startsWith(begin); // otherwise the server already speaks bpmux
    if (end < 0 && answer.length < LINE_MAX && isAnswer) return;
    const line = new TextDecoder().decode(answer.subarray(0, Math.max(end, 0)));
    held.push(answer.slice(end + 1).buffer);
    answer = null;
    if (line === "ok") outcome.resolve();
    else outcome.reject(refusal(line));
  };
  try {
    await outcome.promise;
    return new Session(socket, options, held);
  } catch (error) {
    socket.onclose = socket.onmessage = null;
    socket.close();
    throw error;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", giveUp);
  }
}

function refusal(line) {
  if (!line.startsWith("no ")) {
    const text = "the server did not answer about the token; if it asks for none, leave the token out";
    return new LinkLost(text, { by: "peer" });
  }
  const { text, code } = decodeReason(new TextEncoder().encode(line.slice(3)));
  return new Refused(text, code);
}

function closedEarly(url, { code, reason }) {
  const { text, code: number } = decodeReason(new TextEncoder().encode(reason ?? ""));
  if (text || number) return new Refused(text, number);
  const place = url.split("?")[0];
  const page = globalThis.location?.origin;
  const hint = page ? `; if the server runs, see whether its log says that it doesn't accept pages of ${page}` : "";
  return new LinkLost(`no WebSocket at ${place} (closed with ${code})${hint}`);
}

// ------------------------------------------------------------------------------------------------------ reconnecting

const FINAL = (code) => code >= 400 && code < 500 && code !== 408 && code !== 425 && code !== 429;

const MOVED = 307; // the code of an end that names another URL, as HTTP's temporary redirect
const MOVES_MAX = 5; // redirects in a row that are followed without a pause, so two servers can't keep a client busy
const REDIRECT_MAX = 1000; // characters of a URL

/** Return true if the same attempt may succeed later. */
function canHeal(error) {
  if (error instanceof Refused) return !FINAL(error.code || 401);
  if (error instanceof LinkLost) return error.code === BROKE_A_RULE || !FINAL(error.code);
  return false;
}

/**
 * Iterate over sessions with the server at `url`, each of which is opened when the last one is over.
 *
 *     for await (const session of reconnecting(url)) {
 *       const channel = await session.open("news");
 *       for await (const message of channel) show(message);
 *     }
 *
 * A `LinkLost` that you catch inside of the loop continues with the next session. The pauses between failed attempts are
 * random up to a bound, which starts at `backoff.first` and doubles up to `backoff.most`. A refusal that waiting can't
 * change, such as an invalid token, is thrown.
 *
 * If a server shuts down and names another URL, the next session is opened there, provided that `mayFollow` allows it.
 * When the client can't connect there, it returns to its own URL.
 */
export async function* reconnecting(url, options = {}) {
  const { first = 100, most = 30_000, brief = 1000 } = options.backoff ?? {};
  const { onFailed = () => {}, patience = Infinity, signal, redirects = [] } = options;
  let failures = 0;
  let moves = 0; // redirects in a row without a session that lived
  let lostAt = now();
  let target = null; // the URL to which a server has redirected this client
  for (;;) {
    let failure = null;
    let session = null;
    try {
      session = await connect(target ?? url, options);
    } catch (error) {
      if (target !== null) {
        target = null;
        continue;
      }
      failure = error;
    }
    if (session !== null) {
      const began = now();
      try {
        yield session;
      } finally {
        await session.close();
      }
      lostAt = now();
      const ended = await session.closed;
      if (ended !== null && !canHeal(ended) && ended.by !== "local") throw ended;
      const named = redirectedBy(ended);
      const isMove = named !== null && mayFollow(named, url, redirects);
      if (isMove) target = named;
      if (lostAt - began >= brief) {
        failures = moves = 0;
        continue;
      }
      if (isMove && moves < MOVES_MAX) {
        moves += 1;
        continue;
      }
      failure = ended ?? new LinkLost(`the connection lasted only ${Math.round(lostAt - began)} ms`);
    }
    failures += 1;
    const pause = Math.random() * Math.min(most, first * 2 ** Math.min(failures - 1, 64));
    if (signal?.aborted || !canHeal(failure) || now() - lostAt + pause > patience) throw failure;
    onFailed(failure, pause);
    await sleep(pause, signal);
  }
}

/** Return the URL that a server named when it ended the session, or null. */
function redirectedBy(error) {
  if (!(error instanceof LinkLost) || error.code !== MOVED) return null;
  const [, named] = /(?:^| )bpmux\+(wss?:\/\/\S+)$/.exec(error.reason) ?? [];
  return named !== undefined && named.length <= REDIRECT_MAX ? named : null;
}

/**
 * Return whether a client of `url` follows a redirect to `named`. The client's token goes there too, so the host must be
 * that of `url`, or match one of `hosts`, and TLS must not become plaintext.
 */
function mayFollow(named, url, hosts) {
  if (!URL.canParse(named)) return false;
  const [from, to] = [new URL(resolve(url)), new URL(named)];
  const isNamed = (host) =>
    host === "*" || host === to.hostname || (host.startsWith("*.") && to.hostname.endsWith(host.slice(1)));
  return to.protocol === from.protocol && (to.hostname === from.hostname || hosts.some(isNamed));
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

// --------------------------------------------------------------------------------------------------------- typed calls

const CALL_ITEM = 0; // the first byte of a message: a result or an item follows
const CALL_ERROR = 1; // an error follows, as JSON
const CALL_END = 2; // the stream has no more items
const MS = 1000;
const CODES_OF_CHANNELS = new Map([
  [401, "unauthenticated"],
  [403, "permission_denied"],
  [404, "unimplemented"],
  [405, "unimplemented"],
  [415, "invalid_argument"],
  [422, "invalid_argument"],
  [429, "resource_exhausted"],
  [431, "resource_exhausted"],
  [500, "internal"],
  [504, "deadline_exceeded"],
]);

/** A call failed at the server, or ended without a result. */
export class RpcError extends MuxError {
  constructor(code, message = "", { details = null, type = "" } = {}) {
    super(message ? `${code}: ${message}` : code);
    /** The kind of error, such as "not_found"; the codes are those of gRPC and Connect. */
    this.code = code;
    /** What went wrong, for people. */
    this.reason = message;
    /** What the server adds for programs. */
    this.details = details;
    /** The name of the exception in Python, if the method declares it. */
    this.type = type;
  }
}

/** One call: a promise of its result, or an iterator over the items that the server sends. */
class Call {
  #method;
  #channel;
  #error = null; // why the caller has given up
  #result = null;
  #stop = () => {};

  constructor(session, method, args, { items, signal, timeout } = {}) {
    this.#method = method;
    this.#channel = this.#begin(session, JSON.stringify(args ?? {}), timeout);
    this.#channel.catch(() => {}); // whoever waits for the result gets the error
    const aborted = () => this.#giveUp(signal.reason);
    const late = () => this.#giveUp(new RpcError("deadline_exceeded", `${method} took longer than ${timeout} ms`));
    const timer = timeout === undefined ? undefined : setTimeout(late, timeout);
    this.#stop = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", aborted);
    };
    if (signal?.aborted) aborted();
    else signal?.addEventListener("abort", aborted);
    if (items !== undefined) this.#send(items);
  }

  async #begin(session, payload, timeout) {
    const headers = timeout === undefined ? {} : { timeout: (timeout / MS).toFixed(6) };
    const channel = await session.open(`rpc:${this.#method}`, { payload, headers });
    if (this.#error !== null) channel.abort();
    return channel;
  }

  #giveUp(error) {
    this.#error ??= error;
    this.#stop();
    this.#channel.then((channel) => channel.abort()).catch(() => {});
  }

  async #send(items) {
    try {
      const channel = await this.#channel;
      for await (const item of items) await channel.send(join([[CALL_ITEM], toBytes(JSON.stringify(item))]));
      await channel.send(Uint8Array.of(CALL_END));
    } catch (error) {
      // The server needs no more items, and its answer says why. Errors of the iterable end the call.
      if (!(error instanceof MuxError)) this.#giveUp(error);
    }
  }

  /** Return the next item of the server, or undefined after the last one. */
  async #next(channel) {
    let message;
    try {
      message = await channel.receive();
    } catch (error) {
      if (!(error instanceof ChannelError)) throw this.#error ?? error;
      throw this.#error ?? new RpcError(CODES_OF_CHANNELS.get(error.code) ?? "unavailable", error.reason);
    }
    if (this.#error !== null) throw this.#error;
    if (message === undefined) throw new RpcError("data_loss", `${this.#method} ended without its last message`);
    const text = new TextDecoder().decode(message.subarray(1));
    if (message[0] === CALL_END) return undefined;
    if (message[0] === CALL_ITEM) return { value: JSON.parse(text) };
    if (message[0] !== CALL_ERROR) throw new RpcError("internal", `invalid message: its first byte is ${message[0]}`);
    const { code, message: words, details, type } = JSON.parse(text);
    throw new RpcError(String(code), String(words ?? ""), { details: details ?? null, type: String(type ?? "") });
  }

  async #only() {
    const channel = await this.#channel.catch((error) => {
      throw this.#error ?? error;
    });
    try {
      const item = await this.#next(channel);
      if (item === undefined) throw new RpcError("internal", `${this.#method} returns a stream: use for await`);
      return item.value;
    } finally {
      this.#stop();
      channel.close();
    }
  }

  #promise() {
    this.#result ??= this.#only();
    return this.#result;
  }

  then(fulfilled, rejected) {
    return this.#promise().then(fulfilled, rejected);
  }

  catch(rejected) {
    return this.#promise().catch(rejected);
  }

  finally(done) {
    return this.#promise().finally(done);
  }

  async *[Symbol.asyncIterator]() {
    const channel = await this.#channel.catch((error) => {
      throw this.#error ?? error;
    });
    let ended = false;
    try {
      for (;;) {
        const item = await this.#next(channel).catch((error) => {
          ended = true;
          throw error;
        });
        if (item === undefined) {
          ended = true;
          return;
        }
        yield item.value;
      }
    } finally {
      this.#stop();
      if (ended) channel.close();
      else channel.abort(); // the loop was left early, which cancels the handler
    }
  }
}

/**
 * Call the methods of a service of `muxkit.rpc`: `await client(session, "Orders").get({ id: 7 })`.
 *
 * `muxkit describe URL --typescript` prints the types of the server's services.
 */
export function client(session, service) {
  const method = (name) => (args, options) => new Call(session, `${service}.${name}`, args, options);
  return new Proxy(Object.freeze({}), {
    // A client that had `then` would be taken for a promise.
    get: (_, name) => (typeof name === "string" && name !== "then" ? method(name) : undefined),
  });
}

/** The codec and the engine, for tests and tools. */
export const wire = Object.freeze({
  Type,
  Kind,
  Checks,
  ChunkReader,
  Engine,
  encodeNumber,
  encodePartial,
  encodeChunk,
  encodeReason,
  decodeReason,
  withName,
  withoutName,
});
