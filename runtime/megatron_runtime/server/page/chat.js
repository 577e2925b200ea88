// The conversation: sends questions, streams the answers, and stores both.

import { ServerError, readStatus, streamAnswer } from "./api.js";
import { storage } from "./storage.js";
import { speed, Turn } from "./turns.js";

const WAITS = {
  PAUSED: "waits: the model is paused",
  PAUSING: "waits: the model is being paused",
  UNPAUSING: "waits: the model is being unpaused",
  SUSPENDED: "waits: the model is suspended",
  SUSPENDING: "waits: the model is being suspended",
  RESUMING: "waits: the model is being resumed",
};
const find = (id) => document.getElementById(id);

export class Chat {
  #turns = storage.turns ?? [];
  #settings;
  #model = null;
  #state = null;
  #answer = null; // the answer in progress: its turn, texts and tokens, and an AbortController
  #onError;

  /** `settings()` returns the parameters of a request; `onError(error)` is called for failed requests. */
  constructor(settings, onError) {
    this.#settings = settings;
    this.#onError = onError;
    for (const turn of this.#turns) find("messages").append(new Turn(turn).node);
    this.#render();
    find("composer").addEventListener("submit", (event) => this.#submit(event));
    find("question").addEventListener("keydown", (event) => this.#key(event));
    find("question").addEventListener("input", () => fit(find("question")));
    find("stop").addEventListener("click", () => this.stop());
    find("new-chat").addEventListener("click", () => this.#startNew());
  }

  /** Updates the model and the state of the service; a waiting answer shows the state. */
  update(status) {
    this.#model = status?.model ?? this.#model;
    this.#state = status ? (status.state ?? "NONE") : null;
    if (this.#answer) this.#showProgress();
  }

  stop() {
    this.#answer?.controller.abort();
  }

  #startNew() {
    this.stop();
    this.#turns = [];
    storage.turns = null;
    find("messages").replaceChildren();
    this.#showError(null);
    this.#render();
    find("question").focus();
  }

  #key(event) {
    // Enter also ends the composition of a character, as in Japanese input.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("composer").requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    const question = find("question");
    const content = question.value.trim();
    if (!content || this.#answer) return;
    question.value = "";
    fit(question);
    this.#showError(null);
    this.#ask(content);
  }

  async #ask(content) {
    const userTurn = new Turn({ role: "user", content });
    const turn = new Turn({ role: "assistant", content: "" });
    const turns = this.#turns;
    this.#answer = { turn, text: "", reasoning: "", tokens: 0, firstToken: 0, seconds: 0, controller: new AbortController() };
    const answer = this.#answer;
    find("messages").append(userTurn.node, turn.node);
    turn.node.scrollIntoView({ block: "end" });
    turn.isBusy = true;
    this.#render();
    this.#showProgress();
    let ending;
    try {
      ending = await this.#stream(answer, [...turns, { role: "user", content }]);
    } catch (error) {
      ending = error;
    }
    turn.isBusy = false;
    this.#answer = null;
    if (turns === this.#turns) this.#end(answer, ending, content, userTurn); // otherwise a new chat has started
    this.#render();
    if (!(ending instanceof ServerError && ending.status === 401)) find("question").focus();
  }

  async #stream(answer, turns) {
    const { system, temperature, maxTokens } = this.#settings();
    const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    // A question may come before the first status.
    const model = this.#model ?? (await readStatus(answer.controller.signal)).model;
    const body = { model, messages, temperature, max_tokens: maxTokens };
    let ending = null;
    for await (const piece of streamAnswer(body, answer.controller.signal)) {
      answer.text += piece.text ?? "";
      answer.reasoning += piece.reasoning ?? "";
      answer.tokens = piece.usage?.completion_tokens ?? answer.tokens + piece.tokens;
      if (answer.tokens && !answer.firstToken) answer.firstToken = performance.now();
      if (piece.tokens) answer.seconds = (performance.now() - answer.firstToken) / 1000;
      ending = piece.finishReason ?? ending;
      answer.turn.draw(answer.text, answer.reasoning);
      this.#showProgress();
    }
    return ending;
  }

  /** `ending` is a finish reason or an exception. */
  #end(answer, ending, content, userTurn) {
    const stopped = ending?.name === "AbortError";
    const failed = ending instanceof Error && !stopped;
    if (failed) this.#onError(ending);
    if (failed && !answer.text) {
      // No answer: the question returns to the input, so that it can be sent again.
      userTurn.node.remove();
      answer.turn.node.remove();
      find("question").value ||= content;
      fit(find("question"));
      this.#showError(ending.message);
      return;
    }
    const summary = speed(answer.tokens, answer.seconds);
    if (failed) answer.turn.note(`${ending.message} (${summary})`, true);
    else if (stopped) answer.turn.note(`stopped after ${summary}`);
    else answer.turn.note(ending === "length" ? `${summary}; stopped at the maximum number of tokens` : summary);
    this.#turns.push({ role: "user", content }, { role: "assistant", content: answer.text });
    storage.turns = this.#turns;
    find("announcement").textContent = stopped ? "Stopped." : `The model answered: ${answer.text}`;
  }

  #showProgress() {
    const { turn, tokens, seconds } = this.#answer;
    const waits = this.#state === "NONE" ? "waits for a replica group" : WAITS[this.#state];
    const progress = tokens ? speed(tokens, seconds) : null;
    turn.note([progress, waits].filter(Boolean).join("; ") || "waiting for the first token");
  }

  #showError(message) {
    find("error").hidden = message === null;
    find("error").textContent = message ?? "";
  }

  #render() {
    const busy = this.#answer !== null;
    find("send").hidden = busy;
    find("stop").hidden = !busy;
    find("empty").hidden = find("messages").children.length > 0;
  }
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
