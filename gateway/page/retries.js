// Delays and budget of retries, by the rules of client/millstream_client/{backoff,budget}.py.

const MOST = 100;
const RATIO = 0.1;
const PER_MS = 0.01;

/**
 * Token bucket of retries, which each take a token: a tenth of the requests may be retries, and ten
 * a second besides.
 */
export class RetryBudget {
  #tokens = MOST;
  #at = performance.now();

  /** Adds the tenth of a token that a request earns when it is sent for the first time. */
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

  /** Takes the token of a retry that will be sent after the wait. */
  withdraw() {
    this.#tokens -= 1;
  }
}

/**
 * Random delay in ms ("full jitter"): up to `first` after the first failure, then up to twice that
 * after each further one, but never over `most`.
 */
export function backoffMs(failures, first, most) {
  return failures ? Math.random() * Math.min(most, first * 2 ** (failures - 1)) : 0;
}
