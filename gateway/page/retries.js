// When to try again, and how often: the rules of client/millstream_client/{backoff,budget}.py.

const MOST = 100;
const RATIO = 0.1;
const PER_MS = 0.01;

/** A tenth of the requests may be retries, and ten a second besides; a retry takes a token. */
export class RetryBudget {
  #tokens = MOST;
  #at = performance.now();

  /** A request was sent for the first time. */
  deposit() {
    this.#tokens = Math.min(MOST, this.#tokens + RATIO);
  }

  /** Milliseconds until a retry that is decided on now may be sent. */
  waitMs() {
    const now = performance.now();
    this.#tokens = Math.min(MOST, this.#tokens + (now - this.#at) * PER_MS);
    this.#at = now;
    return Math.max(0, 1 - this.#tokens) / PER_MS;
  }

  /** A retry is decided on: it will be sent after the wait. */
  withdraw() {
    this.#tokens -= 1;
  }
}

/** "Full jitter": after the first failure up to `first`, then twice that, but never over `most`. */
export function backoffMs(failures, first, most) {
  return failures ? Math.random() * Math.min(most, first * 2 ** (failures - 1)) : 0;
}
