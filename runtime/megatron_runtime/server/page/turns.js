// The conversation as people see it: a turn is what one side said.

import { shown } from "./meter.js";
import { prose } from "./prose.js";

const SPEAKERS = { user: "You", assistant: "Model" };
const NEAR_END = 80; // pixels

/** One turn on the page. An answer has notes below, and thoughts of the model above its words. */
export class Turn {
  #words;
  #note;
  #thoughts = null;
  #next = null;

  constructor({ role, content }) {
    this.node = document.createElement("li");
    this.node.className = `turn ${role}`;
    const speaker = document.createElement("h2");
    speaker.textContent = SPEAKERS[role];
    this.#words = document.createElement("div");
    this.#note = document.createElement("p");
    this.#note.className = "note";
    this.#note.hidden = true;
    this.node.append(speaker, this.#words, this.#note);
    this.#words.append(...prose(content));
  }

  /** Draws a text that grows, at most once a frame. */
  draw(text, thought) {
    const waits = this.#next !== null;
    this.#next = { text, thought };
    if (!waits) requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    const { text, thought } = this.#next;
    this.#next = null;
    const scroller = this.node.closest(".conversation");
    const follows = scroller && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
    if (thought) this.#showThought(thought);
    this.#words.replaceChildren(...prose(text));
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  #showThought(thought) {
    if (!this.#thoughts) {
      this.#thoughts = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "What the model thought";
      const words = document.createElement("div");
      this.#thoughts.append(summary, words);
      this.#words.before(this.#thoughts);
    }
    this.#thoughts.lastElementChild.replaceChildren(...prose(thought));
  }

  /** A line below the words; null takes it away. */
  note(text, isProblem = false) {
    this.#note.hidden = text === null;
    this.#note.classList.toggle("problem", isProblem);
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
