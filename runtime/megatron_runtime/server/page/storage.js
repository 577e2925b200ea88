// Values in sessionStorage: they survive a reload of the tab but not its end.

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
    // Storage is full or disabled: the values last until the next reload.
  }
}

const values = Object.fromEntries(["key", "exchanges", "dropped", "settings"].map((name) => [name, read(`megatron-${name}`)]));

/** `storage.key`, `exchanges`, `dropped` and `settings`; null if unset. */
export const storage = new Proxy(values, {
  set(target, name, value) {
    target[name] = value;
    write(`megatron-${name}`, value);
    return true;
  },
});
