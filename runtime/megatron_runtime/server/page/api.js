// The server's API as the page uses it: the state of the service, and answers as they come.

import { events } from "./events.js";
import { kept } from "./kept.js";

const STATUS_MS = 10_000;
const BROKEN = "The connection broke before the answer was complete.";

/** An answer other than 2xx, or none. `status` is 0 when the server was not reached. */
export class Problem extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export async function readStatus(signal = AbortSignal.timeout(STATUS_MS)) {
  const response = await send("status", { cache: "no-store", signal });
  return response.json();
}

/** Yields `{text, thought, tokens, usage, ending}` for each piece of an answer; what a piece has nothing of is null. */
export async function* streamAnswer(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(asked),
    signal,
  });
  const chunks = events(response.body);
  try {
    for (;;) {
      const { value, done } = await chunks.next().catch(broken);
      if (done) throw new Problem(0, BROKEN);
      if (value === "[DONE]") return;
      const chunk = JSON.parse(value);
      if (chunk.error) throw new Problem(500, chunk.error.message);
      yield piece(chunk);
    }
  } finally {
    chunks.return();
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new Problem(0, BROKEN);
}

function piece(chunk) {
  const choice = chunk.choices[0];
  return {
    text: choice?.delta.content ?? null,
    thought: choice?.delta.reasoning_content ?? null,
    tokens: choice?.token_ids?.length ?? 0,
    usage: chunk.usage ?? null,
    ending: choice?.finish_reason ?? null,
  };
}

async function send(path, options) {
  const key = kept.key;
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server can't be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const seconds = Number(response.headers.get("Retry-After")) || null;
  let said = null;
  try {
    said = (await response.json()).error.message;
  } catch {
    // Something between here and the server answered; its words are for other eyes.
  }
  return new Problem(response.status, inWords(response.status, said, seconds), seconds);
}

function inWords(status, said, seconds) {
  const later = seconds ? ` Try again in ${seconds} s.` : " Try again later.";
  if (status === 401) return kept.key ? "The server does not take this API key." : "This server asks for an API key.";
  if (status === 429) return `The server is busy: ${said ?? "too many requests"}.${later}`;
  if (status === 503) return `The server can't answer now: ${said ?? "unavailable"}.${later}`;
  return said ?? `The server answered with status ${status}.`;
}
