// What outlives a reload of the tab, and ends with the tab.

function read(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Storage that is full or forbidden: the page works without it, until it is loaded again.
  }
}

const values = Object.fromEntries(["key", "turns", "settings"].map((name) => [name, read(`megatron-${name}`)]));

/** `kept.key`, `kept.turns`, `kept.settings`; null where there is none. */
export const kept = new Proxy(values, {
  set(target, name, value) {
    target[name] = value;
    write(`megatron-${name}`, value);
    return true;
  },
});
