// Client of the server's API: the state of the service, numbers of tokens, and streamed answers.

import { errorOf, errorOfEvent, interrupted, unreachable } from "./errors.js";
import { events } from "./events.js";
import { storage } from "./storage.js";

const STATUS_MS = 10_000;

export async function readStatus(signal = AbortSignal.timeout(STATUS_MS)) {
  const response = await send("status", { cache: "no-store", signal });
  return response.json();
}

/** The number of tokens of a prompt with these messages, and the length of the model's context in tokens. */
export async function countTokens(messages, signal) {
  const response = await send("tokenize", post({ messages }, signal));
  const { count, max_model_len } = await response.json();
  return { count, longest: max_model_len };
}

/** Yields `{text, reasoning, tokens, usage, finishReason}` for each chunk of an answer; null for what a chunk lacks. */
export async function* streamAnswer(body, signal) {
  const request = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const response = await send("v1/chat/completions", post(request, signal));
  const chunks = events(response.body);
  try {
    for (;;) {
      const { value, done } = await chunks.next().catch(connectionLost);
      if (done) throw interrupted();
      if (value === "[DONE]") return;
      const chunk = JSON.parse(value);
      if (chunk.error) throw errorOfEvent(chunk.error);
      yield parse(chunk);
    }
  } finally {
    chunks.return();
  }
}

function connectionLost(error) {
  throw error.name === "AbortError" ? error : interrupted();
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

function post(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

async function send(path, options) {
  const key = storage.key;
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (!response.ok) throw await errorOf(response, key !== null);
  return response;
}
