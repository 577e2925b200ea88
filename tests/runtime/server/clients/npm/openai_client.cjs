// What the official client of npm makes of an endpoint: `node openai_client.cjs BASE_URL CASE` prints it as JSON.

const OpenAI = require("openai");
const { zodFunction, zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const [baseURL, wanted] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "chat";
const CAPITAL = [{ role: "user", content: "What is the capital of France?" }];
const WEATHER = [{ role: "user", content: "What is the weather in Paris, in celsius?" }];
const Weather = z.object({ city: z.enum(["Paris", "Köln"]), days: z.number().int().min(1).max(9) });
const short = { model, messages: CAPITAL, max_tokens: 12, temperature: 0 };

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function refusalOf(promise) {
  const error = await promise.then(
    () => null,
    (problem) => problem,
  );
  return { kind: error?.constructor.name, status: error?.status, code: error?.code, param: error?.param };
}

const cases = {
  models: async () => (await client.models.list()).data.map((each) => each.id),

  plain: async () => {
    const { choices, usage } = await client.chat.completions.create(short);
    return { text: choices[0].message.content, ending: choices[0].finish_reason, usage };
  },

  streamed: async () => {
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collected(await client.chat.completions.create({ ...short, ...options }));
    const pieces = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? "");
    return { text: pieces.join(""), pieces: pieces.filter(Boolean).length, usage: chunks.at(-1).usage };
  },

  helper: async () => {
    const deltas = [];
    const stream = client.chat.completions.stream(short).on("content", (delta) => deltas.push(delta));
    const { choices } = await stream.finalChatCompletion();
    return { text: choices[0].message.content, joined: deltas.join("") };
  },

  left: async () => {
    const stream = await client.chat.completions.create({ model, messages: CAPITAL, stream: true, ignore_eos: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break;
    return stream.controller.signal.aborted;
  },

  tools: async () => {
    const tool = zodFunction({ name: "weather", parameters: Weather });
    const asked = { model, messages: WEATHER, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const { choices } = await client.chat.completions.parse({ ...asked, seed: 5 });
    const streamed = await client.chat.completions.stream({ ...asked, seed: 5 }).finalChatCompletion();
    const [calls, again] = [choices, streamed.choices].map(([choice]) => choice.message.tool_calls);
    return {
      names: calls.map((call) => call.function.name),
      parsed: calls.map((call) => Weather.parse(call.function.parsed_arguments)),
      streamed: again.map((call) => Weather.parse(call.function.parsed_arguments)),
      ending: choices[0].finish_reason,
    };
  },

  run: async () => {
    const seen = [];
    const tool = {
      type: "function",
      function: {
        name: "weather",
        parameters: z.toJSONSchema(Weather),
        parse: JSON.parse,
        function: (given) => {
          seen.push(Weather.parse(given));
          return "It is sunny.";
        },
      },
    };
    const asked = { model, messages: WEATHER, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const runner = client.chat.completions.runTools(asked, { maxChatCompletions: 1 });
    await runner.done();
    return { calls: seen.length, roles: runner.messages.map((message) => message.role) };
  },

  structured: async () => {
    const format = zodResponseFormat(Weather, "weather");
    const { choices } = await client.chat.completions.parse({ model, messages: WEATHER, response_format: format });
    return Weather.parse(choices[0].message.parsed);
  },

  responses: async () => {
    const asked = { model, input: CAPITAL[0].content, max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(asked);
    const events = await collected(await client.responses.create({ ...asked, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    const format = zodTextFormat(Weather, "weather");
    const form = await client.responses.parse({ model, input: WEATHER[0].content, text: { format } });
    return {
      text: whole.output_text,
      streamed: deltas.map((event) => event.delta).join(""),
      last: events.at(-1).type,
      parsed: Weather.parse(form.output_parsed),
    };
  },

  completions: async () => {
    const asked = { model, prompt: "Water boils at", max_tokens: 4, temperature: 0, logprobs: 2 };
    const { choices } = await client.completions.create(asked);
    return { text: choices[0].text, tokens: choices[0].logprobs.tokens };
  },

  refusals: async () => ({
    model: await refusalOf(client.chat.completions.create({ ...short, model: "another" })),
    field: await refusalOf(client.chat.completions.create({ ...short, temperature: 9 })),
    dimensions: await refusalOf(client.embeddings.create({ model, input: "a", dimensions: 8 })),
  }),
};

cases[wanted]().then((result) => console.log(JSON.stringify(result)));
