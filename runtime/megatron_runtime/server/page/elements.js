// Helpers for DOM nodes.

export const find = (id) => document.getElementById(id);

/** A new element with attributes and children, which are nodes or texts. */
export function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Gives a text area the height of its text. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Calls `send()` for Enter, and `cancel()` for Escape. Both keys also end the composition of a character. */
export function onKeys(area, send, cancel = null) {
  area.addEventListener("keydown", (event) => {
    if (event.isComposing || event.shiftKey) return;
    const action = { Enter: send, Escape: cancel }[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}

/** Says a text to screen readers. */
export function announce(text) {
  find("announcement").textContent = text;
}
