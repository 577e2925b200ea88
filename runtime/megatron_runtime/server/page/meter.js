// Tokens per second from sampled counters.

const WINDOW_SECONDS = 5;

/** The rate of one counter over the last seconds while it runs; a counter that decreases has been reset. */
class Meter {
  #samples = [];

  add(seconds, count, isRunning) {
    const last = this.#samples.at(-1);
    if (last && (count < last.count || !isRunning)) this.#samples = [];
    this.#samples.push({ seconds, count });
    while (seconds - this.#samples[0].seconds > WINDOW_SECONDS) this.#samples.shift();
  }

  get rate() {
    const first = this.#samples[0];
    const last = this.#samples.at(-1);
    return last.seconds > first.seconds ? (last.count - first.count) / (last.seconds - first.seconds) : 0;
  }
}

/** One meter per attempt of a replica group, so that new and removed ones do not change the rate. */
export class Meters {
  #meters = new Map();

  /** Adds the replica groups of a status; returns the rate of each and their sum. */
  add(seconds, groups) {
    const now = new Map();
    for (const group of groups) {
      const name = `${group.index}.${group.attempt}`;
      const meter = this.#meters.get(name) ?? new Meter();
      meter.add(seconds, group.generated_tokens, group.state === "RUNNING");
      now.set(name, meter);
    }
    this.#meters = now;
    const rates = [...now.values()].map((meter) => meter.rate);
    return { each: rates, all: rates.reduce((sum, rate) => sum + rate, 0) };
  }
}

export function shown(rate) {
  return rate >= 10 || rate === 0 ? rate.toFixed(0) : rate.toFixed(1);
}

/** A number of tokens and, unless it is null, their rate. */
export function speed(tokens, rate) {
  const count = `${tokens} ${tokens === 1 ? "token" : "tokens"}`;
  return rate === null ? count : `${count}, ${shown(rate)} per second`;
}
