// The conversation: sends questions, shows the answers, and stores both.

import { Answer } from "./answer.js";
import { copy } from "./clipboard.js";
import { TooLongError } from "./context.js";
import { announce, element, find, fitHeight, onKeys } from "./elements.js";
import { ServerError } from "./errors.js";
import { storage } from "./storage.js";
import { AnswerTurn, QuestionTurn } from "./turns.js";
import { Undo } from "./undo.js";

/**
 * An exchange is `{question, answer, turns}`: texts, and the turns of both on the page. `answer` has `content`,
 * `reasoning`, `note` and `isError`.
 */
export class Chat {
  #exchanges = [];
  #dropped = 0; // exchanges that no longer fit the model's context
  #settings;
  #model = null;
  #state = null;
  #answer = null; // the answer in progress
  #undo = new Undo((saved) => this.#restore(saved));
  #onError;

  /** `settings` has the parameters of requests; `onError(error)` is called for failed requests. */
  constructor(settings, onError) {
    this.#settings = settings;
    this.#onError = onError;
    this.#restore({ exchanges: (storage.exchanges ?? []).map(withTurns), dropped: storage.dropped ?? 0 });
    const question = find("question");
    find("composer").addEventListener("submit", (event) => this.#submit(event));
    onKeys(question, () => find("composer").requestSubmit());
    question.addEventListener("input", () => fitHeight(question));
    find("stop").addEventListener("click", () => this.stop());
    find("new-chat").addEventListener("click", () => this.#startNew());
    find("messages").addEventListener("click", (event) => this.#act(event.target.closest("button[data-action]")));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.stop();
    });
  }

  get isAnswering() {
    return this.#answer !== null;
  }

  /** Updates the model and the state of the service; a waiting answer shows the state. */
  update(status) {
    this.#model = status?.model ?? this.#model;
    this.#state = status ? (status.state ?? "NONE") : null;
    this.#answer?.update(this.#state);
  }

  stop() {
    this.#answer?.stop();
  }

  #startNew() {
    const saved = this.#saved();
    this.stop();
    this.#restore({ exchanges: [], dropped: 0 });
    if (saved.exchanges.length) this.#undo.offer("The conversation was removed.", saved);
    else this.#undo.clear();
    this.#showError(null);
    find("question").focus();
  }

  #submit(event) {
    event.preventDefault();
    const question = find("question");
    const content = question.value.trim();
    if (!content || this.#answer) return;
    this.#undo.clear();
    if (!this.#ask(content, this.#exchanges.length, (text) => this.#giveBack(text))) return;
    question.value = "";
    fitHeight(question);
  }

  /** A question without an answer returns to the input, so that it can be sent again. */
  #giveBack(text) {
    find("question").value ||= text;
    fitHeight(find("question"));
  }

  #act(button) {
    if (!button) return;
    const index = this.#exchanges.findIndex(({ turns }) => turns.some((turn) => turn.node.contains(button)));
    const exchange = this.#exchanges[index];
    const action = button.dataset.action;
    if (action === "copy-code") {
      const code = button.closest(".code").querySelector("code");
      copy(code.textContent, button, code);
    } else if (action === "copy-answer") {
      copy(exchange?.answer.content ?? this.#answer.content, button, button.closest(".turn").querySelector(".content"));
    } else if (action === "retry") {
      this.#replace(index, exchange.question, () => {});
    } else {
      this.#edit(index);
    }
  }

  #edit(index, text = this.#exchanges[index].question) {
    for (const { turns } of this.#exchanges) turns[0].closeEditor();
    const again = (failed) => this.#edit(index, failed);
    this.#exchanges[index].turns[0].edit((edited) => this.#replace(index, edited, again), text);
  }

  /** Asks again, instead of an exchange and those after it. */
  #replace(index, question, onFailure) {
    const saved = this.#saved();
    if (this.#answer || !this.#ask(question, index, onFailure)) return;
    const later = 2 * (saved.exchanges.length - index - 1);
    this.#undo.offer(later ? `${later} later messages were removed.` : "The previous answer was removed.", saved);
  }

  /** Asks after the first `kept` exchanges; false if a setting is invalid. `onFailure` gets a question without answer. */
  #ask(question, kept, onFailure) {
    const invalid = this.#settings.problem();
    this.#showError(invalid);
    if (invalid) return false;
    const saved = this.#saved();
    if (kept < saved.exchanges.length) this.#restore({ exchanges: saved.exchanges.slice(0, kept), dropped: 0 });
    this.#run(question, saved, onFailure);
    return true;
  }

  async #run(question, saved, onFailure) {
    const exchanges = this.#exchanges;
    const answer = new Answer();
    const turns = [new QuestionTurn(question), answer.turn];
    this.#answer = answer;
    find("messages").append(...turns.map((turn) => turn.node));
    turns[1].node.scrollIntoView({ block: "end" });
    answer.update(this.#state);
    this.#render();
    const conversation = { exchanges, question, dropped: this.#dropped };
    const ending = await answer
      .run(this.#model, this.#settings.values, conversation, (dropped) => this.#drop(dropped))
      .catch(expected);
    if (this.#answer !== answer) return; // the conversation was replaced
    this.#answer = null;
    const stored = answer.end(ending);
    if (stored.isError) this.#onError(ending);
    if (stored.isError && !answer.content) {
      this.#fail(ending, question, saved, onFailure);
      return;
    }
    this.#exchanges = [...exchanges, { question, answer: stored, turns }];
    this.#store();
    this.#render();
    const stopped = ending?.name === "AbortError";
    announce(stopped ? "Stopped." : `The model answered: ${answer.content}`);
    if (document.activeElement === document.body) find("question").focus();
  }

  #fail(error, question, saved, onFailure) {
    this.#undo.clear();
    this.#restore(saved);
    this.#showError(error.message);
    onFailure(question);
    if (error.status !== 401 && document.activeElement === document.body) find("question").focus();
  }

  /** Marks the exchanges that are not sent any more. */
  #drop(dropped) {
    if (dropped > this.#dropped) announce("The oldest messages no longer fit the model's context.");
    this.#dropped = dropped;
    this.#markDropped();
  }

  #markDropped() {
    find("messages").querySelector(".divider")?.remove();
    if (this.#dropped === 0) return;
    const text = "The messages above no longer fit the model's context, so the model does not receive them.";
    const last = this.#exchanges[this.#dropped - 1].turns[1].node;
    last.after(element("li", { class: "divider" }, text));
  }

  #saved() {
    return { exchanges: this.#exchanges, dropped: this.#dropped };
  }

  /** Shows other exchanges, and forgets an answer in progress. */
  #restore({ exchanges, dropped }) {
    this.#answer?.stop();
    this.#answer = null;
    this.#exchanges = exchanges;
    this.#dropped = dropped;
    for (const { turns } of exchanges) turns[0].closeEditor();
    find("messages").replaceChildren(...exchanges.flatMap(({ turns }) => turns.map((turn) => turn.node)));
    this.#markDropped();
    this.#store();
    this.#render();
  }

  #store() {
    storage.exchanges = this.#exchanges.map(({ question, answer }) => ({ question, answer }));
    storage.dropped = this.#dropped;
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
    for (const button of find("messages").querySelectorAll("[data-action=retry], [data-action=edit]")) {
      button.disabled = busy;
    }
  }
}

/** Errors with a message for the user; others are also reported to the console. */
function expected(error) {
  const isExpected = error.name === "AbortError" || error instanceof ServerError || error instanceof TooLongError;
  if (!isExpected) reportError(error);
  return error;
}

function withTurns({ question, answer }) {
  return { question, answer, turns: [new QuestionTurn(question), new AnswerTurn(answer)] };
}
