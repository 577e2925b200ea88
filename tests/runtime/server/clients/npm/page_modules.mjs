// Calls functions of the page's modules that need no browser: `node page_modules.mjs FOLDER CASE`, prints JSON.

import { pathToFileURL } from "node:url";

const [folder, name] = process.argv.slice(2);
const load = (module) => import(pathToFileURL(`${folder}/${module}`));

const exchanges = [1, 2, 3, 4].map((each) => ({ question: `q${each}`, answer: { content: `a${each}` } }));

/** Fits conversations with ten tokens per message into a context of `longest`; also returns the number of counts. */
async function fits(longest, options) {
  const { fit } = await load("context.js");
  let counts = 0;
  const count = async (messages) => {
    counts += 1;
    return { count: 10 * messages.length, longest };
  };
  const asked = { system: "", exchanges, question: "q5", wanted: 20, dropped: 0, ...options };
  try {
    const { messages, dropped, maxTokens } = await fit(asked, count);
    return { sent: messages.map((each) => each.content).join(" "), dropped, maxTokens, counts };
  } catch (error) {
    return { error: error.message, counts };
  }
}

const cases = {
  async context() {
    return {
      everything: await fits(200, {}),
      justEnough: await fits(110, {}),
      one: await fits(109, {}),
      two: await fits(70, {}),
      all: await fits(35, {}),
      sticky: await fits(200, { dropped: 3 }),
      system: await fits(70, { system: "s" }),
      short: await fits(95, { wanted: 2 }),
      quarter: await fits(120, { wanted: 1000 }),
      tight: await fits(12, {}),
      tooLong: await fits(10, {}),
      tooLongWithSystem: await fits(15, { system: "s", exchanges: [] }),
    };
  },

  async rates() {
    const { Stopwatch } = await load("stopwatch.js");
    const { Meters, speed } = await load("meter.js");
    const stopwatch = new Stopwatch();
    const seen = [stopwatch.rate];
    for (const [tokens, now] of [[5, 1], [10, 2], [0, 2.5], [10, 3]]) stopwatch.add(tokens, now);
    seen.push(stopwatch.rate);
    stopwatch.interrupt();
    stopwatch.add(1, 100);
    stopwatch.add(10, 101);
    seen.push(stopwatch.rate);
    const meters = new Meters();
    const add = (seconds, tokens, state) =>
      meters.add(seconds, [{ index: 0, attempt: 0, generated_tokens: tokens, state }]).all;
    const metered = [
      add(0, 0, "RUNNING"),
      add(1, 10, "RUNNING"),
      add(2, 12, "PAUSED"),
      add(3, 12, "PAUSED"),
      add(4, 22, "RUNNING"),
      add(5, 2, "RUNNING"),
    ];
    return { seen, metered, words: [speed(1, null), speed(12, 3.25), speed(12, 32.5)] };
  },

  async errors() {
    const { errorOf, errorOfEvent } = await load("errors.js");
    const told = async (status, error, headers = {}, hasKey = true) =>
      (await errorOf(new Response(JSON.stringify({ error }), { status, headers }), hasKey)).message;
    const later = { "Retry-After": "5" };
    return [
      await told(401, {}, {}, false),
      await told(401, {}),
      await told(429, { code: "queue_full", message: "1 answers are in flight" }, later),
      await told(503, { code: "draining", message: "the server is shutting down" }, later),
      await told(503, { code: "stopped", message: "the model is stopped" }),
      await told(400, { code: "context_length_exceeded", message: "max_tokens: 9", param: "max_tokens" }),
      await told(400, { message: "temperature: must be at most 2", param: "temperature" }),
      await told(400, { message: "min_p: must be at most 1", param: "min_p" }),
      await told(500, { message: "internal error" }),
      (await errorOf(new Response("<html>", { status: 502 }), true)).message,
      (await errorOf(new Response("<html>", { status: 418 }), true)).message,
      errorOfEvent({ type: "timeout_error", message: "the request took 600 s" }).message,
      errorOfEvent({ type: "server_error", message: "internal" }).message,
    ];
  },
};

console.log(JSON.stringify(await cases[name]()));
