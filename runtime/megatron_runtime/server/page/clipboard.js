// Copies text to the clipboard.

import { announce } from "./elements.js";

const SHOWN_MS = 2000;

/** Copies `text`, and shows the result on the button. `source` is the node that shows the text. */
export async function copy(text, button, source) {
  const isDone = await written(text, source);
  button.dataset.label ??= button.textContent; // which a result may still hide
  button.textContent = isDone ? "Copied" : "Press Ctrl + C";
  announce(isDone ? "Copied." : "The browser refused to copy; the text is selected, press Ctrl + C.");
  setTimeout(() => (button.textContent = button.dataset.label), SHOWN_MS);
}

async function written(text, source) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // The user or a policy denies it.
    }
  }
  // Browsers have no clipboard API on pages from plain HTTP, except those of this machine.
  getSelection().selectAllChildren(source);
  return document.execCommand("copy");
}
