// Errors of the server, in the words of the page.

const STATUS_OF_TYPE = {
  invalid_request_error: 400,
  timeout_error: 408,
  rate_limit_error: 429,
  service_unavailable_error: 503,
};
const LABELS = { temperature: "Temperature", max_tokens: "Maximum length", messages: "The conversation" };
const OF_CODE = {
  context_length_exceeded: "The conversation is longer than the model's context. Shorten your message, or start a new chat.",
  draining: "The server is shutting down.",
  stopped: "The model is stopped.",
  no_replica_group: "No replica group is available to answer.",
};
const OF_STATUS = {
  403: "The server does not permit this request.",
  404: "The server no longer serves this model. Reload the page.",
  408: "The answer took longer than this server permits.",
  413: "The conversation is too large for this server. Shorten your message, or start a new chat.",
  429: "The server is busy with other requests.",
  502: "The server can't be reached through its proxy.",
  503: "The server can't answer now.",
  504: "The server did not answer its proxy in time.",
};
const PASSES = [429, 502, 503, 504]; // the same request may succeed later

/** A response other than 2xx, or a failed connection, whose `status` is 0. The message is for the user. */
export class ServerError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const unreachable = () => new ServerError(0, "The server can't be reached. Check your connection.");
export const interrupted = () => new ServerError(0, "The connection was lost before the answer was complete.");

/** The error of a response that is not 2xx; a proxy may have written its body. */
export async function errorOf(response, hasKey) {
  const seconds = Number(response.headers.get("Retry-After")) || null;
  const error = await response.json().then((body) => body.error, () => null);
  return new ServerError(response.status, words(response.status, error ?? {}, seconds, hasKey), seconds);
}

/** The error of an event in a stream, which has no status. */
export function errorOfEvent(error) {
  const status = STATUS_OF_TYPE[error.type] ?? 500;
  return new ServerError(status, words(status, error, null, true));
}

function words(status, { code, param, message }, seconds, hasKey) {
  if (status === 401) return hasKey ? "The server rejected this API key." : "This server requires an API key.";
  const reason = OF_CODE[code] ?? OF_STATUS[status];
  if (reason) return PASSES.includes(status) ? `${reason} ${later(seconds)}` : reason;
  if (status >= 500) return "The server failed to answer. Try again; the cause is in the log of the server.";
  const label = LABELS[param?.split(".")[0]];
  if (label) return `${label} is not accepted by the server: ${message.replace(`${param}: `, "")}`;
  return `The server did not accept the request: ${message ?? `status ${status}`}`;
}

function later(seconds) {
  return seconds ? `Try again in ${seconds} s.` : "Try again later.";
}
