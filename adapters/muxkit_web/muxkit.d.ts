/** The types of muxkit.js: a bpmux client for browsers and Node, over one WebSocket. */

/** A message that can be sent. Strings are sent as UTF-8; received messages are always bytes. */
export type Message = string | ArrayBuffer | ArrayBufferView;

/** The base class of all errors of this module. */
export class MuxError extends Error {}

/** The connection is over. */
export class LinkLost extends MuxError {
  constructor(message: string, facts?: { by?: Side; reason?: string; code?: number; cause?: unknown });
  /** Which side ended it. */
  readonly by: Side;
  /** The peer's own words; empty if it gave none. */
  readonly reason: string;
  /** The peer's number for programs; 0 if it gave none. */
  readonly code: number;
}

/** The server refused this client, for example because it doesn't accept the token. */
export class Refused extends MuxError {
  constructor(reason: string, code?: number);
  readonly reason: string;
  readonly code: number;
}

interface ChannelFacts {
  /** The peer's own words; empty if it gave none. */
  readonly reason: string;
  /** The peer's number for programs; 0 if it gave none. */
  readonly code: number;
  /** The end payload as it came. */
  readonly payload: Uint8Array;
}

/** The peer gave up on a channel before it had sent everything. Some messages are missing. */
export class ChannelCancelled extends MuxError implements ChannelFacts {
  readonly reason: string;
  readonly code: number;
  readonly payload: Uint8Array;
}

/** The peer doesn't receive on this channel any more, or it declined a request. */
export class ChannelStopped extends MuxError implements ChannelFacts {
  readonly reason: string;
  readonly code: number;
  readonly payload: Uint8Array;
}

/** The peer broke a rule of the protocol, or exceeded one of our limits. */
export class ProtocolError extends MuxError {
  constructor(message: string, rule?: string);
  /** The number of the clause, such as "bpmux-R23"; empty for a limit. */
  readonly rule: string;
}

export type Side = "local" | "peer" | "network";

/** What a `WebSocket` of the page or of Node has, as far as a session uses it. */
export interface WebSocketLike {
  binaryType: string;
  readonly bufferedAmount: number;
  readonly readyState: number;
  readonly url: string;
  onopen: ((event: any) => void) | null;
  onmessage: ((event: any) => void) | null;
  onclose: ((event: any) => void) | null;
  onerror: ((event: any) => void) | null;
  send(data: Uint8Array<ArrayBuffer>): void;
  close(code?: number, reason?: string): void;
}

export interface SessionOptions {
  /** Bytes that the peer may send on each channel before you read them. Default: 262144. */
  window?: number;
  /** The largest message that is sent or accepted, in bytes. Default: 16777216. */
  maxMessage?: number;
  /** Ping after `interval` ms of silence, give up after `timeout` ms more. Default: 20000 each; null never pings. */
  keepalive?: { interval?: number; timeout?: number } | null;
}

export interface ConnectOptions extends SessionOptions {
  /** What the server's `authorize=` gets to see. */
  token?: string;
  /** The subprotocols to offer to the server. */
  protocols?: string | string[];
  /** Gives up on connecting. It has no effect on a session that is open. */
  signal?: AbortSignal;
  /** Milliseconds until the session must be open. Default: 30000. */
  timeout?: number;
  /** The WebSocket class to use, for Node without a global one. */
  WebSocket?: new (url: string, protocols?: string | string[]) => WebSocketLike;
}

export interface ReconnectOptions extends ConnectOptions {
  backoff?: {
    /** The bound of the pause after the first failure, in ms; it doubles with each further one. Default: 100. */
    first?: number;
    /** No pause is longer, in ms. Default: 30000. */
    most?: number;
    /** A session that lasted less than this many ms counts as a failure. Default: 1000. */
    brief?: number;
  };
  /**
   * Hosts to which a server that shuts down may send this client, besides the host of its URL: `["*.example.org"]`, or
   * `["*"]` for all. The client's token goes there as well. TLS never becomes plaintext.
   */
  redirects?: string[];
  /** Milliseconds without a session after which the last failure is thrown. Default: forever. */
  patience?: number;
  /** Called with each failure and the ms until the next attempt. */
  onFailed?: (error: unknown, pause: number) => void;
}

/** A two-way channel. Use either its streams or its methods, which lock the streams when they are first called. */
export class Channel {
  private constructor();
  readonly session: Session;
  /** The name for which it was opened. */
  readonly name: string;
  /** The headers that came with the opening. The peer has set them, so check them before you use them. */
  readonly headers: Readonly<Record<string, string>>;
  /** The payload that came with the opening. */
  readonly opening: Uint8Array;
  /** The messages of the peer. What you don't read isn't granted to the peer again. */
  readonly readable: ReadableStream<Uint8Array>;
  /** The messages for the peer. Its back-pressure is the peer's window. */
  readonly writable: WritableStream<Message>;
  /** Send a message; waits for the peer's window. */
  send(message: Message): Promise<void>;
  /** Receive the next message; undefined after the last one. */
  receive(): Promise<Uint8Array | undefined>;
  [Symbol.asyncIterator](): AsyncGenerator<Uint8Array, void, void>;
  /** Send nothing more; resolves when the peer has received everything. You can go on receiving. */
  finish(): Promise<void>;
  /** Finish sending, and receive nothing more. */
  close(): Promise<void>;
  /** Give up on the channel in both directions; the peer reads the reason. */
  abort(reason?: string, options?: { code?: number }): void;
  /** Measure one round trip on this channel, in milliseconds. */
  ping(): Promise<number>;
}

/** A request of the peer. */
export class IncomingRequest {
  private constructor();
  readonly payload: Uint8Array;
  /** Aborted when the peer needs no response any more. */
  readonly signal: AbortSignal;
  /** Send the response. */
  respond(message: Message): void;
  /** Give no response; the peer reads the reason. */
  decline(reason?: string, options?: { code?: number }): void;
}

/** A bpmux session over an open WebSocket; `connect` makes one. */
export class Session {
  /** Run a session over a WebSocket that is open, such as one that a server of yours has accepted. */
  constructor(socket: WebSocketLike, options?: SessionOptions);
  readonly url: string;
  /** Resolves when the session is over: with null if both sides took leave in order, otherwise with what ended it. */
  readonly closed: Promise<LinkLost | null>;
  /** Resolves when the peer takes no new channels any more, because it is about to end the session. */
  readonly draining: Promise<void>;
  /** Why the session is over; null while it isn't. */
  readonly error: LinkLost | null;
  /** The peer's messages that belong to no channel. */
  readonly readable: ReadableStream<Uint8Array>;
  /** Messages for the peer that belong to no channel. Closing it ends the opening of channels as well. */
  readonly writable: WritableStream<Message>;
  /** Open a two-way channel; the peer chooses what to do by its name. */
  open(name?: string, options?: { payload?: Message; headers?: Record<string, string> }): Promise<Channel>;
  /** Open a channel to send on. */
  openSink(payload?: Message): Promise<WritableStream<Message>>;
  /** Open a channel to receive from. */
  openSource(payload?: Message): Promise<ReadableStream<Uint8Array>>;
  /** Send a request and wait for its response. Aborting the signal cancels the request at the peer. */
  request(payload?: Message, options?: { signal?: AbortSignal }): Promise<Uint8Array>;
  /** The channels that the peer opens. */
  readonly incoming: ReadableStream<Channel>;
  /** The requests of the peer. */
  readonly requests: ReadableStream<IncomingRequest>;
  /** The channels on which only the peer sends. */
  readonly sources: ReadableStream<{ readable: ReadableStream<Uint8Array>; opening: Uint8Array }>;
  /** The channels on which only this side sends. */
  readonly sinks: ReadableStream<{ writable: WritableStream<Message>; opening: Uint8Array }>;
  /** Measure one round trip, in milliseconds. */
  ping(): Promise<number>;
  /** Finish all channels, wait until the peer has confirmed that, and hang up; at most `linger` ms. Default: 5000. */
  close(options?: { linger?: number }): Promise<void>;
  /** End the session immediately; the peer reads the reason. */
  abort(reason?: string, options?: { code?: number }): void;
}

/**
 * Open a session with the server at `url`, such as `wss://example.org/mux`.
 *
 * Rejects with `LinkLost` if there is no connection, and with `Refused` if the server doesn't accept the token.
 */
export function connect(url: string | URL, options?: ConnectOptions): Promise<Session>;

/** Iterate over sessions with the server at `url`, each of which is opened when the last one is over. */
export function reconnecting(url: string | URL, options?: ReconnectOptions): AsyncGenerator<Session, void, void>;

/** A call failed at the server, or ended without a result. */
export class RpcError extends MuxError {
  constructor(code: string, message?: string, facts?: { details?: unknown; type?: string });
  /** The kind of error, such as "not_found"; the codes are those of gRPC and Connect. */
  readonly code: string;
  /** What went wrong, for people. */
  readonly reason: string;
  /** What the server adds for programs; null if it adds nothing. */
  readonly details: unknown;
  /** The name of the exception in Python, if the method declares it; otherwise empty. */
  readonly type: string;
}

export interface CallOptions {
  /** Cancels the call, on the server too. */
  signal?: AbortSignal;
  /** Milliseconds after which the call is cancelled on both sides. */
  timeout?: number;
}

/** Options of a method that takes a stream. */
export interface StreamOptions<Item> extends CallOptions {
  items: AsyncIterable<Item> | Iterable<Item>;
}

/**
 * Call the methods of a service of `muxkit.rpc`.
 *
 * `muxkit describe URL --typescript` prints the types: `client<Orders>(session, "Orders").get({ id: 7 })`.
 */
export function client<Service extends object>(session: Session, service: string): Service;

/** The codec and the engine, for tests and tools; not covered by the promise of compatibility. */
export const wire: Readonly<Record<string, any>>;
