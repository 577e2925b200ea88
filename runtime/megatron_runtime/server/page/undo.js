// The offer to undo the removal of messages.

import { find } from "./elements.js";

export class Undo {
  #saved = null;

  /** `restore(saved)` is called with the conversation before the removal. */
  constructor(restore) {
    find("undo").addEventListener("click", () => {
      const saved = this.#saved;
      this.clear();
      restore(saved);
      find("question").focus();
    });
  }

  offer(text, saved) {
    this.#saved = saved;
    find("removed-text").textContent = text;
    find("removed").hidden = false;
  }

  clear() {
    this.#saved = null;
    find("removed-text").textContent = "";
    find("removed").hidden = true;
  }
}
