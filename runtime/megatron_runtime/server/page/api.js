// Client of the server's API: the state of the service, and streamed answers.

import { events } from "./events.js";
import { storage } from "./storage.js";

const STATUS_MS = 10_000;
const CONNECTION_LOST = "The connection was lost before the answer was complete.";

/** A response other than 2xx, or a failed connection, whose `status` is 0. */
export class ServerError extends Error {
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

/** Yields `{text, reasoning, tokens, usage, finishReason}` for each chunk of an answer; null for what a chunk lacks. */
export async function* streamAnswer(body, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  const chunks = events(response.body);
  try {
    for (;;) {
      const { value, done } = await chunks.next().catch(connectionLost);
      if (done) throw new ServerError(0, CONNECTION_LOST);
      if (value === "[DONE]") return;
      const chunk = JSON.parse(value);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      yield parse(chunk);
    }
  } finally {
    chunks.return();
  }
}

function connectionLost(error) {
  throw error.name === "AbortError" ? error : new ServerError(0, CONNECTION_LOST);
}

function parse(chunk) {
  const choice = chunk.choices[0];
  return {
    text: choice?.delta.content ?? null,
    reasoning: choice?.delta.reasoning_content ?? null,
    tokens: choice?.token_ids?.length ?? 0,
    usage: chunk.usage ?? null,
    finishReason: choice?.finish_reason ?? null,
  };
}

async function send(path, options) {
  const key = storage.key;
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server can't be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const seconds = Number(response.headers.get("Retry-After")) || null;
  let message = null;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy answered instead of the server; its body is not shown.
  }
  return new ServerError(response.status, describe(response.status, message, seconds), seconds);
}

function describe(status, message, seconds) {
  const later = seconds ? ` Try again in ${seconds} s.` : " Try again later.";
  if (status === 401) return storage.key ? "The server rejected this API key." : "This server requires an API key.";
  if (status === 429) return `The server is busy: ${message ?? "too many requests"}.${later}`;
  if (status === 503) return `The server can't answer now: ${message ?? "unavailable"}.${later}`;
  return message ?? `The server responded with status ${status}.`;
}
