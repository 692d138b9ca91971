// Millstream's client for browsers: any number of requests over one WebSocket, which is reopened
// whenever it is lost. Accepted requests are resumed behind their last token; others are sent again
// under their idempotency key. So no token is lost, none comes twice, and no request runs twice.
//
//   const client = new Client({ key });
//   for await (const chunk of client.generate({ model, prompt, max_tokens: 40 })) show(chunk.text);
//
// Frames and their fields are those of docs/websocket.md.

import { RetryBudget, backoffMs } from "./retries.js";
import { MillstreamError, Parting, Stream } from "./stream.js";

export { MillstreamError, Stream };

const PROTOCOL = "millstream.v1.json";
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/; // what a browser may name a subprotocol
const OPEN_MS = 3000;
const PROBE_MS = 2000; // after so long without a frame the gateway is asked for one
const SILENT_MS = 3000; // a gateway that does not answer for so long is frozen, or out of reach
const PROBE = { type: "cancel", id: "are you there" }; // pages cannot ping; an error answers this
const MOST_OPEN = 1000; // the gateway takes 1024 of one socket
const TOO_BIG = 1009;
const REFUSALS = { // by the reason of a close with 1008
  key_revoked: "This API key was revoked.",
  key_expired: "This API key or token has expired.",
  insufficient_scope: "This API key may no longer send requests.",
  address_not_allowed: "This API key may no longer be used from here.",
};

/**
 * Sends requests to the gateways of one cell, of which one is used at a time. Fires `connection`
 * events: `detail.state` is "open", "lost" or "unreachable", `detail.failures` is the number of
 * failed connections in a row.
 */
export class Client extends EventTarget {
  #urls;
  #protocols;
  #patienceMs;
  #streams = new Map(); // from each stream under way to its id on this socket
  #open = new Map();
  #waiting = [];
  #ids = 0;
  #socket = null;
  #dialling = false;
  #draining = false;
  #closed = false;
  #failures = 0; // to connect, in a row
  #heard = 0; // when the last frame came, by performance.now()
  #probed = 0;
  #watching = 0;
  #budget = new RetryBudget();

  /**
   * @param {object} options
   * @param {string} options.key the API key: letters, digits and !#$%&'*+.^_`|~- only
   * @param {string[]} [options.gateways] the gateways' URLs; by default the page's own origin
   * @param {number} [options.patienceMs] how long a request may be held up by refusals, or by
   *   gateways that cannot be reached, before it fails
   */
  constructor({ key, gateways = [location.origin], patienceMs = 30000 }) {
    super();
    if (!TOKEN.test(key)) {
      const why = "A browser cannot send this key: it has spaces or special characters.";
      throw new MillstreamError("invalid_api_key", why);
    }
    this.#urls = shuffled(gateways.map(socketUrl));
    this.#protocols = [PROTOCOL, "bearer." + key];
    this.#patienceMs = patienceMs;
  }

  /**
   * @param {object} ask the fields of a `generate` frame but `id`
   * @param {import("./stream.js").Options} [options]
   * @returns {Stream} its chunks; `ended` is a promise of its `Done`
   */
  generate(ask, options) {
    return this.#submit("generate", ask, options);
  }

  /**
   * @param {object} ask the fields of an `embed` frame but `id`
   * @param {import("./stream.js").Options} [options]
   * @returns {Promise<import("./stream.js").Result>}
   */
  embed(ask, options) {
    return this.#submit("embed", ask, options).ended;
  }

  /**
   * @param {object} ask the fields of a `classify` frame but `id`
   * @param {import("./stream.js").Options} [options]
   * @returns {Promise<import("./stream.js").Result>}
   */
  classify(ask, options) {
    return this.#submit("classify", ask, options).ended;
  }

  /**
   * Cancels all requests under way and closes the socket; the client may be used again. If there is
   * no socket at the moment the next one is opened, to cancel there.
   */
  close() {
    this.#closed = true;
    for (const stream of [...this.#streams.keys()]) if (!stream.left) stream.return();
    this.#hangUp();
  }

  // --- sockets --------------------------------------------------------------------------------

  async #connect() {
    if (this.#socket || this.#dialling) return;
    this.#dialling = true;
    while (this.#someWait()) {
      await pause(this.#pauseMs());
      const socket = await this.#dial();
      if (socket) {
        this.#use(socket);
        break;
      }
      this.#tell("unreachable");
      this.#giveUp();
    }
    this.#dialling = false;
  }

  // Opens a socket to the next gateway; resolves to null if that cannot be reached or refuses.
  #dial() {
    this.#urls.push(this.#urls.shift());
    this.#failures += 1;
    const socket = new WebSocket(this.#urls.at(-1), this.#protocols);
    const late = setTimeout(() => socket.close(), OPEN_MS);
    return new Promise((resolve) => {
      socket.onopen = () => resolve(socket);
      socket.onclose = () => resolve(null);
    }).finally(() => clearTimeout(late));
  }

  #pauseMs() {
    if (this.#failures % this.#urls.length) return 0;
    return backoffMs(this.#failures / this.#urls.length, 100, 2000);
  }

  #someWait() {
    this.#waiting = this.#waiting.filter((stream) => !stream.over);
    return this.#waiting.length > 0;
  }

  #giveUp() {
    const since = performance.now() - this.#patienceMs;
    const error = new MillstreamError("not_connected", "The gateway refused the connection or cannot be reached.");
    for (const stream of this.#waiting) if (stream.heldSince <= since) this.#fail(stream, error);
  }

  #use(socket) {
    this.#socket = socket;
    this.#draining = false;
    this.#heard = this.#probed = performance.now();
    socket.onmessage = (event) => this.#receive(JSON.parse(event.data), event.data.length);
    socket.onclose = (event) => this.#lost(event.code, event.reason);
    this.#watching = setInterval(() => this.#watch(), PROBE_MS / 4);
    this.#tell("open");
    this.#openWaiting();
    if (this.#closed) this.#hangUp();
  }

  // Probes a silent socket: a frozen gateway, or a network that is gone, does not close it.
  #watch() {
    const now = performance.now();
    if (this.#open.size === 0) return;
    if (this.#heard < this.#probed) {
      if (now - this.#probed > SILENT_MS) this.#lost();
    } else if (now - this.#heard > PROBE_MS) {
      this.#probed = now;
      this.#send(PROBE);
    }
  }

  #lost(code, reason) {
    if (code === TOO_BIG) {
      this.#failLargest(new MillstreamError("payload_too_large", "The gateway does not take a frame of this size."));
    }
    this.#hangUp();
    if (Object.hasOwn(REFUSALS, reason)) {
      const error = new MillstreamError(reason, REFUSALS[reason]);
      for (const stream of [...this.#streams.keys()]) this.#fail(stream, error);
    }
    this.#tell("lost");
    if (this.#someWait()) this.#connect();
  }

  // Closes the socket; requests open on it wait for another one, unless this client is closed.
  #hangUp() {
    const socket = this.#socket;
    if (!socket) return;
    clearInterval(this.#watching);
    this.#socket = socket.onmessage = socket.onclose = null;
    socket.close();
    for (const stream of this.#streams.keys()) this.#streams.set(stream, null);
    for (const stream of this.#open.values()) this.#hold(stream);
    this.#open.clear();
  }

  #hold(stream) {
    stream.heldSince = performance.now();
    if (this.#closed) this.#streams.delete(stream);
    else this.#waiting.push(stream);
  }

  // Moves to the next gateway, if it accepts a socket; requests under way are resumed there.
  async #moveOn() {
    if (this.#dialling) return;
    this.#dialling = true;
    const socket = await this.#dial();
    this.#dialling = false;
    if (socket) {
      this.#hangUp();
      this.#use(socket);
    } else if (this.#someWait()) {
      this.#connect();
    }
  }

  #tell(state) {
    const detail = { state, failures: this.#failures };
    this.dispatchEvent(new CustomEvent("connection", { detail }));
  }

  #send(frame) {
    const text = JSON.stringify(frame);
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(text);
    return text.length;
  }

  // --- streams --------------------------------------------------------------------------------

  #submit(type, ask, options) {
    const session = {
      queue: (stream) => this.#queue(stream),
      cancel: (stream) => this.#cancel(stream),
      letGo: (stream) => this.#letGo(stream),
    };
    const stream = new Stream(session, type, ask, options);
    if (stream.over) return stream;
    this.#closed = false;
    this.#budget.deposit();
    stream.heldSince = performance.now();
    this.#streams.set(stream, null);
    this.#queue(stream);
    return stream;
  }

  #queue(stream) {
    if (stream.over) return;
    this.#waiting.push(stream);
    this.#openWaiting();
    this.#connect();
  }

  #openWaiting() {
    while (this.#socket && this.#waiting.length && this.#open.size < MOST_OPEN) {
      const stream = this.#waiting.shift();
      if (!stream.over) this.#openOne(stream, String(++this.#ids));
    }
  }

  #openOne(stream, id) {
    this.#streams.set(stream, id);
    this.#open.set(id, stream);
    if (!stream.refusals) stream.heldSince = performance.now();
    stream.openingLength = this.#send({ ...stream.opening(), id });
    stream.sent = true;
    if (stream.cancelWanted) this.#send({ type: "cancel", id });
  }

  #cancel(stream) {
    const id = this.#streams.get(stream);
    if (id === undefined) return;
    if (stream.behind) {
      this.#streams.set(stream, null); // its reader opens it again, which may never happen
      this.#part(new Parting(stream), id);
    } else if (id) {
      this.#send({ type: "cancel", id });
    }
  }

  // Ends a request whose reader has left, whatever state it is in.
  #letGo(stream) {
    const id = this.#streams.get(stream);
    if (id === undefined) return;
    this.#release(stream);
    if (stream.sent || stream.requestId !== null) this.#part(new Parting(stream), id);
  }

  // Cancels a request at the gateway that has it open under `id`, or else at the next one. The
  // parting is kept until a gateway reports the end, since a cancel may be lost with its socket.
  #part(parting, id) {
    this.#streams.set(parting, id);
    if (id === null) return this.#queue(parting);
    this.#open.set(id, parting);
    this.#send({ type: "cancel", id });
  }

  // Ignores further frames of a request, which keeps its id and can be cancelled under it.
  #setAside(stream) {
    this.#open.delete(this.#streams.get(stream));
    this.#openWaiting();
  }

  // Frees the id of a request; further frames under it are ignored.
  #release(stream) {
    this.#open.delete(this.#streams.get(stream));
    if (stream.over) this.#streams.delete(stream);
    else this.#streams.set(stream, null);
    this.#openWaiting();
  }

  #fail(stream, error) {
    stream.fail(error);
    this.#release(stream);
  }

  // Fails the largest request that is not accepted yet: a gateway that did not read a frame cannot
  // name its id, but if any frame was too large the largest was.
  #failLargest(error) {
    const sent = [...this.#open.values()].filter((stream) => stream.requestId === null);
    if (sent.length) this.#fail(sent.reduce((a, b) => (b.openingLength > a.openingLength ? b : a)), error);
  }

  #receive(frame, size) {
    this.#heard = performance.now();
    this.#failures = 0;
    const stream = this.#open.get(frame.id);
    if (frame.type === "error") {
      this.#receiveError(stream, frame);
    } else if (frame.type === "draining") {
      this.#draining = true;
      this.#moveOn();
    } else if (stream) {
      stream.receive(frame, size);
      if (stream.over) this.#release(stream);
      else if (stream.behind) this.#setAside(stream);
    }
  }

  #receiveError(stream, { code, message, retry_after_ms: retryAfterMs }) {
    const error = new MillstreamError(code, message, retryAfterMs);
    if (stream) {
      this.#release(stream);
      stream.sent = false;
      if (!this.#triesAgain(stream, error)) this.#fail(stream, error);
    } else if (code === "payload_too_large") {
      this.#failLargest(error);
    }
  }

  // Tries a request again if its error allows that; returns false if the error is its end.
  #triesAgain(stream, error) {
    if (stream.left && stream.requestId === null) return false; // nobody has it
    if (error.code === "request_not_found" && stream.requestId !== null && !stream.cancelWanted) {
      stream.unaccept();
      this.#queue(stream);
      return true;
    }
    if (error.retryAfterMs === undefined || !this.#rests(stream, error.retryAfterMs)) return false;
    const elsewhere = error.code === "broker_unavailable" && this.#urls.length > 1;
    if (this.#draining || elsewhere) this.#moveOn();
    return true;
  }

  // Schedules a refused request again; returns false if that would exceed `patienceMs`.
  #rests(stream, retryAfterMs) {
    stream.refusals += 1;
    const held = performance.now() - stream.heldSince;
    let wait = retryAfterMs + backoffMs(stream.refusals, 250, 8000);
    const isNew = stream.requestId === null; // an accepted request is load that the gateway has already taken
    if (isNew) wait = Math.max(wait, this.#budget.waitMs());
    if (held + wait > this.#patienceMs) return false;
    if (isNew) this.#budget.withdraw();
    setTimeout(() => this.#queue(stream), wait);
    return true;
  }
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

function socketUrl(gateway) {
  const url = new URL(gateway.replace(/\/*$/, "/v1/stream"), location.href);
  url.protocol = url.protocol.replace("http", "ws");
  return url.href;
}

function shuffled(items) {
  return items
    .map((item) => [Math.random(), item])
    .sort(([a], [b]) => a - b)
    .map(([, item]) => item);
}
