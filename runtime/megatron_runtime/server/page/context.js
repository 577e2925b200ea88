// Fits a conversation into the model's context: drops its oldest exchanges, and limits the length of the answer.

const MIN_SHARE = 4; // An answer gets its maximum length or this fraction of the context, before exchanges are dropped.

/** The message can't be sent as it is; the message of the error is for the user. */
export class TooLongError extends Error {}

/**
 * Decides what to send. `exchanges` are those before the question, of which the first `dropped` are not sent any more;
 * `wanted` is the maximum number of tokens of the answer; `count(messages)` returns `{count, longest}`.
 *
 * Returns `{messages, dropped, maxTokens}`. Throws TooLongError when the question alone leaves no room for an answer.
 */
export async function fit({ system, exchanges, question, wanted, dropped }, count) {
  const prompt = (first) => messagesOf(system, exchanges.slice(first), question);
  const room = async (first) => {
    const messages = prompt(first);
    const { count: tokens, longest } = await count(messages);
    const left = longest - tokens;
    return { messages, dropped: first, left, longest, tokens, isEnough: left >= Math.min(wanted, longest / MIN_SHARE) };
  };
  let best = await room(dropped);
  if (!best.isEnough && dropped < exchanges.length) best = await fewestDropped(dropped, exchanges.length, room);
  if (best.left < 1) {
    const remedy = system ? "Shorten it or the system prompt." : "Shorten it.";
    const sizes = `it makes a prompt of ${best.tokens} tokens, and the model's context has ${best.longest}`;
    throw new TooLongError(`Your message is too long: ${sizes}. ${remedy}`);
  }
  return { messages: best.messages, dropped: best.dropped, maxTokens: Math.min(wanted, best.left) };
}

/** Bisects between `low`, which leaves too little room, and `high`, which drops all exchanges. */
async function fewestDropped(low, high, room) {
  let best = await room(high);
  while (best.isEnough && high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    const tried = await room(middle);
    if (tried.isEnough) [best, high] = [tried, middle];
    else low = middle;
  }
  return best;
}

function messagesOf(system, exchanges, question) {
  const before = exchanges.flatMap((each) => [
    { role: "user", content: each.question },
    { role: "assistant", content: each.answer.content },
  ]);
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...before, { role: "user", content: question }];
}
