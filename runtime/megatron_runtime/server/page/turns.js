// The turns of the conversation on the page: a question and its answer.

import { element, fitHeight, onKeys } from "./elements.js";
import { drawMarkdown } from "./markdown.js";

const NEAR_END = 80; // pixels

/** A question, which can be edited. */
export class QuestionTurn {
  #text;
  #content = element("div", { class: "content text" });
  #actions = actions(["edit", "Edit", "Edit this message"]);
  #editor = null;

  constructor(text) {
    this.#text = text;
    this.#content.append(text);
    this.node = element("li", { class: "turn user" }, element("h2", {}, "You"), this.#content, this.#actions);
  }

  /** Shows an editor instead of the text; `send(text)` is called with another text that is not empty. */
  edit(send, text = this.#text) {
    if (this.#editor) return;
    const area = element("textarea", { rows: 1, "aria-label": "Edit your message" }, text);
    const buttons = element("div", { class: "actions" });
    buttons.append(
      element("button", { type: "submit" }, "Send"),
      element("button", { type: "button", class: "quiet" }, "Cancel"),
    );
    this.#editor = element("form", { class: "editor" }, area, buttons);
    this.#editor.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) send(area.value.trim());
    });
    buttons.lastElementChild.addEventListener("click", () => this.#cancel());
    onKeys(area, () => this.#editor.requestSubmit(), () => this.#cancel());
    area.addEventListener("input", () => fitHeight(area));
    this.#content.replaceWith(this.#editor);
    this.#actions.hidden = true;
    fitHeight(area);
    area.focus();
  }

  /** Closes the editor without a change. */
  closeEditor() {
    this.#editor?.replaceWith(this.#content);
    this.#editor = null;
    this.#actions.hidden = false;
  }

  #cancel() {
    this.closeEditor();
    this.#actions.firstElementChild.focus();
  }
}

/** An answer, with the reasoning of the model above its text and a note below. */
export class AnswerTurn {
  #content = element("div", { class: "content" });
  #note = element("p", { class: "note" });
  #reasoning = null;
  #next = null;

  constructor({ content = "", reasoning = "", note = null, isError = false } = {}) {
    const buttons = actions(["retry", "Retry", "Retry this answer"], ["copy-answer", "Copy", "Copy this answer"]);
    this.node = element("li", { class: "turn assistant" }, element("h2", {}, "Model"), this.#content, this.#note, buttons);
    this.#show(content, reasoning);
    this.note(note, isError);
  }

  get content() {
    return this.#content;
  }

  /** Draws a growing text, at most once per frame. */
  draw(text, reasoning) {
    const waits = this.#next !== null;
    this.#next = { text, reasoning };
    if (!waits) requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    const { text, reasoning } = this.#next;
    this.#next = null;
    const scroller = this.node.closest(".conversation");
    const follows = scroller && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
    this.#show(text, reasoning);
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  #show(text, reasoning) {
    if (reasoning && !this.#reasoning) {
      this.#reasoning = element("details", {}, element("summary", {}, "Reasoning"), element("div", {}));
      this.#content.before(this.#reasoning);
    }
    if (reasoning) drawMarkdown(this.#reasoning.lastElementChild, reasoning);
    drawMarkdown(this.#content, text);
  }

  /** A line below the text; null removes it. */
  note(text, isError = false) {
    this.#note.hidden = text === null;
    this.#note.classList.toggle("error", isError);
    if (this.#note.textContent !== text) this.#note.textContent = text ?? "";
  }

  set isBusy(busy) {
    this.node.setAttribute("aria-busy", String(busy));
  }
}

function actions(...buttons) {
  const node = element("div", { class: "actions" });
  for (const [action, label, title] of buttons) {
    node.append(element("button", { type: "button", class: "quiet", "data-action": action, "aria-label": title }, label));
  }
  return node;
}
