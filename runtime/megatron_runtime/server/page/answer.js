// An answer in progress.

import { countTokens, readStatus, streamAnswer } from "./api.js";
import { fit } from "./context.js";
import { speed } from "./meter.js";
import { Stopwatch } from "./stopwatch.js";
import { AnswerTurn } from "./turns.js";

const WAITS = {
  NONE: "waits for a replica group",
  PAUSED: "waits: the model is paused",
  PAUSING: "waits: the model is being paused",
  UNPAUSING: "waits: the model is being resumed",
  SUSPENDED: "waits: the model is suspended",
  SUSPENDING: "waits: the model is being suspended",
  RESUMING: "waits: the model is being resumed",
};

/** Streams one answer into its turn. `content` and `reasoning` are its text so far. */
export class Answer {
  turn = new AnswerTurn();
  content = "";
  reasoning = "";
  #tokens = 0;
  #stopwatch = new Stopwatch();
  #state = null;
  #controller = new AbortController();
  #isLimitedByContext = false;

  constructor() {
    this.turn.isBusy = true;
  }

  stop() {
    this.#controller.abort();
  }

  /** Sends the conversation that fits. `onFit(dropped)` is called with the number of exchanges that do not. Throws
   *  ServerError, TooLongError, or AbortError after `stop`. */
  async run(model, { system, temperature, maxTokens }, conversation, onFit) {
    const { signal } = this.#controller;
    // A question may come before the first status.
    const served = model ?? (await readStatus(signal)).model;
    const asked = { ...conversation, system, wanted: maxTokens };
    const fitted = await fit(asked, (messages) => countTokens(messages, signal));
    this.#isLimitedByContext = fitted.maxTokens < maxTokens;
    onFit(fitted.dropped);
    const body = { model: served, messages: fitted.messages, temperature, max_tokens: fitted.maxTokens };
    let reason = null;
    for await (const piece of streamAnswer(body, signal)) {
      this.#add(piece);
      reason = piece.finishReason ?? reason;
    }
    return reason;
  }

  #add(piece) {
    this.content += piece.text ?? "";
    this.reasoning += piece.reasoning ?? "";
    this.#tokens = piece.usage?.completion_tokens ?? this.#tokens + piece.tokens;
    this.#stopwatch.add(piece.tokens, performance.now() / 1000);
    this.turn.draw(this.content, this.reasoning);
    this.#showProgress();
  }

  /** Shows the state of the service, which is null while it is unknown. */
  update(state) {
    this.#state = state;
    if (state !== null && state !== "RUNNING") this.#stopwatch.interrupt();
    this.#showProgress();
  }

  #showProgress() {
    const progress = this.#tokens ? this.#summary() : null;
    this.turn.note([progress, WAITS[this.#state]].filter(Boolean).join("; ") || "waiting for the first token");
  }

  #summary() {
    return speed(this.#tokens, this.#stopwatch.rate);
  }

  /** Ends the answer; `ending` is a finish reason or an exception. Returns what to store. */
  end(ending) {
    this.turn.isBusy = false;
    const { note, isError } = this.#outcome(ending);
    this.turn.note(note, isError);
    return { content: this.content, reasoning: this.reasoning, note, isError };
  }

  #outcome(ending) {
    if (ending?.name === "AbortError") return { note: `stopped after ${this.#summary()}`, isError: false };
    if (ending instanceof Error) return { note: `${ending.message} (${this.#summary()})`, isError: true };
    if (ending !== "length") return { note: this.#summary(), isError: false };
    const limit = this.#isLimitedByContext ? "the model's context is full" : "it reached the maximum length";
    return { note: `${this.#summary()}; stopped: ${limit}`, isError: false };
  }
}
