// The conversation: asks, follows the answer, and keeps what was said.

import { Problem, readStatus, streamAnswer } from "./api.js";
import { kept } from "./kept.js";
import { speed, Turn } from "./turns.js";

const WAITS = {
  PAUSED: "waits: the model is paused",
  PAUSING: "waits: the model is being paused",
  UNPAUSING: "waits: the model begins again",
  SUSPENDED: "waits: the model is suspended",
  SUSPENDING: "waits: the model is being suspended",
  RESUMING: "waits: the model is coming back",
};
const find = (id) => document.getElementById(id);

export class Chat {
  #turns = kept.turns ?? [];
  #settings;
  #model = null;
  #state = null;
  #answer = null; // what is being answered: the turn, its texts, its tokens, and the way to stop it
  #onProblem;

  /** `settings()` gives what to ask with; `onProblem(problem)` hears of refusals. */
  constructor(settings, onProblem) {
    this.#settings = settings;
    this.#onProblem = onProblem;
    for (const turn of this.#turns) find("messages").append(new Turn(turn).node);
    this.#show();
    find("composer").addEventListener("submit", (event) => this.#submit(event));
    find("question").addEventListener("keydown", (event) => this.#key(event));
    find("question").addEventListener("input", () => fit(find("question")));
    find("stop").addEventListener("click", () => this.stop());
    find("new-chat").addEventListener("click", () => this.#begin());
  }

  /** What the service is and does; an answer that waits says why. */
  follow(status) {
    this.#model = status?.model ?? this.#model;
    this.#state = status ? (status.state ?? "NONE") : null;
    if (this.#answer) this.#tell();
  }

  stop() {
    this.#answer?.stopper.abort();
  }

  #begin() {
    this.stop();
    this.#turns = [];
    kept.turns = null;
    find("messages").replaceChildren();
    this.#complain(null);
    this.#show();
    find("question").focus();
  }

  #key(event) {
    // While a word is being composed, as in Japanese, Enter ends that word.
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
    this.#complain(null);
    this.#ask(content);
  }

  async #ask(content) {
    const asked = new Turn({ role: "user", content });
    const turn = new Turn({ role: "assistant", content: "" });
    const turns = this.#turns;
    this.#answer = { turn, text: "", thought: "", tokens: 0, begun: 0, seconds: 0, stopper: new AbortController() };
    const answer = this.#answer;
    find("messages").append(asked.node, turn.node);
    turn.node.scrollIntoView({ block: "end" });
    turn.isBusy = true;
    this.#show();
    this.#tell();
    let ending;
    try {
      ending = await this.#follow(answer, [...turns, { role: "user", content }]);
    } catch (error) {
      ending = error;
    }
    turn.isBusy = false;
    this.#answer = null;
    if (turns === this.#turns) this.#end(answer, ending, content, asked); // else another chat has begun
    this.#show();
    if (!(ending instanceof Problem && ending.status === 401)) find("question").focus();
  }

  async #follow(answer, turns) {
    const { system, temperature, most } = this.#settings();
    const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    // Whoever asks at once is faster than the first look at the service.
    const model = this.#model ?? (await readStatus(answer.stopper.signal)).model;
    const body = { model, messages, temperature, max_tokens: most };
    let ending = null;
    for await (const piece of streamAnswer(body, answer.stopper.signal)) {
      answer.text += piece.text ?? "";
      answer.thought += piece.thought ?? "";
      answer.tokens = piece.usage?.completion_tokens ?? answer.tokens + piece.tokens;
      if (answer.tokens && !answer.begun) answer.begun = performance.now();
      if (piece.tokens) answer.seconds = (performance.now() - answer.begun) / 1000;
      ending = piece.ending ?? ending;
      answer.turn.draw(answer.text, answer.thought);
      this.#tell();
    }
    return ending;
  }

  /** `ending` is a finish reason, or what was thrown. */
  #end(answer, ending, content, asked) {
    const stopped = ending?.name === "AbortError";
    const failed = ending instanceof Error && !stopped;
    if (failed) this.#onProblem(ending);
    if (failed && !answer.text) {
      // Nothing was answered: the question goes back to where it can be sent again.
      asked.node.remove();
      answer.turn.node.remove();
      find("question").value ||= content;
      fit(find("question"));
      this.#complain(ending.message);
      return;
    }
    const words = speed(answer.tokens, answer.seconds);
    if (failed) answer.turn.note(`${ending.message} (${words})`, true);
    else if (stopped) answer.turn.note(`stopped after ${words}`);
    else answer.turn.note(ending === "length" ? `${words}; cut at the most tokens` : words);
    this.#turns.push({ role: "user", content }, { role: "assistant", content: answer.text });
    kept.turns = this.#turns;
    find("news").textContent = stopped ? "Stopped." : `The model answered: ${answer.text}`;
  }

  #tell() {
    const { turn, tokens, seconds } = this.#answer;
    const waits = this.#state === "NONE" ? "waits for a replica of the model" : WAITS[this.#state];
    const words = tokens ? speed(tokens, seconds) : null;
    turn.note([words, waits].filter(Boolean).join("; ") || "begins to answer");
  }

  #complain(message) {
    find("problem").hidden = message === null;
    find("problem").textContent = message ?? "";
  }

  #show() {
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
