// One generation over the WebSocket of `/v1/stream`. A socket that drops is opened anew and the
// request resumed behind its last token; what was never accepted is sent again under the same
// idempotency key, so nothing is generated twice.

const PROTOCOL = "millstream.v1.json";
const ID = "page";
const TOKEN = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/; // what a browser may name a subprotocol
const PAUSES_MS = [0, 250, 500, 1000, 2000, 2000, 2000, 2000]; // about the grace period

export class Generation {
  // `ask` holds the fields of a `generate` frame. `on` holds callbacks: connection(state, attempt)
  // with "connecting", "open" or "resuming"; frame(frame) for each frame but repeated text;
  // end(frame) once, with the `done` or `error` frame that ended it.
  constructor(key, ask, on) {
    this.key = key;
    this.ask = { type: "generate", id: ID, idempotency_key: crypto.randomUUID?.() ?? random(), ...ask };
    this.on = on;
    this.requestId = null;
    this.sent = 0; // when the request first left, by performance.now()
    this.last = -1; // index of the last token received
    this.drops = 0; // since the gateway last answered
    this.reached = false;
    this.ended = false;
    this.cancelled = false;
  }

  start() {
    if (!TOKEN.test(this.key)) {
      this.fail("invalid_api_key", "A browser cannot send this key: it has spaces or special characters.");
      return;
    }
    this.on.connection("connecting", 0);
    this.connect();
  }

  // Ends the generation early; its `done` frame follows.
  cancel() {
    this.cancelled = true;
    this.send({ type: "cancel", id: ID });
  }

  connect() {
    const url = new URL("/v1/stream", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    this.socket = new WebSocket(url, [PROTOCOL, "bearer." + this.key]);
    this.socket.onopen = () => this.opened();
    this.socket.onmessage = (event) => this.receive(JSON.parse(event.data));
    this.socket.onclose = (event) => this.dropped(event);
  }

  opened() {
    this.reached = true;
    if (this.requestId === null) {
      this.sent ||= performance.now();
      this.send(this.ask);
    } else {
      this.send({ type: "resume", id: ID, request_id: this.requestId, after: this.last });
    }
    if (this.cancelled) this.send({ type: "cancel", id: ID });
  }

  send(frame) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(frame));
  }

  receive(frame) {
    if (this.ended || (frame.id !== undefined && frame.id !== ID)) return;
    if (frame.type === "done" || frame.type === "error") {
      this.end(frame);
      return;
    }
    if (frame.type === "accepted") this.accepted(frame);
    if (frame.type === "chunk" && !this.isNext(frame)) return;
    this.on.frame(frame);
  }

  accepted(frame) {
    this.requestId = frame.request_id;
    this.drops = 0;
    this.on.connection("open", 0);
  }

  // True if the chunk continues the text; a repeated one is passed over, a gap ends it all.
  isNext(chunk) {
    if (chunk.index > this.last + 1) {
      this.fail("token_gap", `Tokens ${this.last + 1} to ${chunk.index - 1} are missing.`);
      return false;
    }
    if (chunk.index <= this.last) return false;
    this.last = chunk.index + chunk.count - 1;
    return true;
  }

  dropped(event) {
    if (this.ended) return;
    if (!this.reached) {
      this.fail("not_connected", "The gateway refused the connection or cannot be reached.");
      return;
    }
    if (this.drops >= PAUSES_MS.length) {
      this.fail("connection_lost", `The connection was lost (${event.code}) and could not be restored.`);
      return;
    }
    this.on.connection("resuming", this.drops + 1);
    setTimeout(() => this.connect(), PAUSES_MS[this.drops]);
    this.drops += 1;
  }

  fail(code, message) {
    this.end({ type: "error", code, message });
  }

  end(frame) {
    this.ended = true;
    this.socket?.close();
    this.on.end(frame);
  }
}

// randomUUID needs a secure context; a page over plain HTTP from another host has none.
function random() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("-");
}
