// The messages of the conversation.

import { shown } from "./meter.js";
import { markdown } from "./markdown.js";

const SPEAKERS = { user: "You", assistant: "Model" };
const NEAR_END = 80; // pixels

/** One message on the page. An answer has a note below and the reasoning of the model above its text. */
export class Turn {
  #text;
  #note;
  #reasoning = null;
  #next = null;

  constructor({ role, content }) {
    this.node = document.createElement("li");
    this.node.className = `turn ${role}`;
    const speaker = document.createElement("h2");
    speaker.textContent = SPEAKERS[role];
    this.#text = document.createElement("div");
    this.#note = document.createElement("p");
    this.#note.className = "note";
    this.#note.hidden = true;
    this.node.append(speaker, this.#text, this.#note);
    this.#text.append(...markdown(content));
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
    if (reasoning) this.#showReasoning(reasoning);
    this.#text.replaceChildren(...markdown(text));
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  #showReasoning(reasoning) {
    if (!this.#reasoning) {
      this.#reasoning = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      const text = document.createElement("div");
      this.#reasoning.append(summary, text);
      this.#text.before(this.#reasoning);
    }
    this.#reasoning.lastElementChild.replaceChildren(...markdown(reasoning));
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

export function speed(tokens, seconds) {
  const rate = seconds > 0 && tokens > 1 ? `, ${shown((tokens - 1) / seconds)} per second` : "";
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${rate}`;
}
