// The speed of one answer.

/** Measures the time between chunks of tokens, without the intervals in which the engines did not run. */
export class Stopwatch {
  #last = null; // seconds
  #isInterrupted = false;
  #seconds = 0;
  #tokens = 0; // those that arrived within the measured time

  /** Adds a chunk of tokens that arrived at the time `now`, in seconds. */
  add(tokens, now) {
    if (!tokens) return;
    if (this.#last !== null && !this.#isInterrupted) {
      this.#seconds += now - this.#last;
      this.#tokens += tokens;
    }
    this.#last = now;
    this.#isInterrupted = false;
  }

  /** The engines do not run: the interval between the last chunk and the next one does not count. */
  interrupt() {
    this.#isInterrupted = true;
  }

  /** Tokens per second; null before two chunks. */
  get rate() {
    return this.#seconds > 0 ? this.#tokens / this.#seconds : null;
  }
}
