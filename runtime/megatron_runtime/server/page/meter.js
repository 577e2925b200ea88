// Tokens per second out of counters that are looked at now and then.

const WINDOW_SECONDS = 5;

/** The rate over the last seconds of one counter; a counter that falls has begun anew. */
class Meter {
  #samples = [];

  add(seconds, count) {
    const last = this.#samples.at(-1);
    if (last && count < last.count) this.#samples = [];
    this.#samples.push({ seconds, count });
    while (seconds - this.#samples[0].seconds > WINDOW_SECONDS) this.#samples.shift();
  }

  get rate() {
    const first = this.#samples[0];
    const last = this.#samples.at(-1);
    return last.seconds > first.seconds ? (last.count - first.count) / (last.seconds - first.seconds) : 0;
  }
}

/** One meter a replica, so that those which come and go don't count as tokens. */
export class Meters {
  #meters = new Map();

  /** Takes the replicas of a status; returns the rate of each by its name, and of all. */
  add(seconds, replicas) {
    const now = new Map();
    for (const replica of replicas) {
      const name = `${replica.group}.${replica.attempt}`;
      const meter = this.#meters.get(name) ?? new Meter();
      meter.add(seconds, replica.generated_tokens);
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
