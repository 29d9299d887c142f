// openai-node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API, HISTORY, KEY, MODEL, QUESTION, WEATHER, WEATHER_TOOL, check, checkWeather, report } from "./contract.mjs";

const client = new OpenAI({ baseURL: API, apiKey: KEY, maxRetries: 0 });
const chat = (fields) => client.chat.completions.create({ model: MODEL, messages: QUESTION, ...fields });
const named = { type: "function", function: { name: "get_weather" } };

await report({
  plain: async () => {
    const answer = await chat({ max_tokens: 16 });
    check(answer.choices[0].message.content && answer.usage.completion_tokens, answer);
  },
  stream: async () => {
    let text = "";
    for await (const chunk of await chat({ max_tokens: 16, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    check(text, text);
  },
  "tools forced": async () => {
    for (const tool_choice of ["required", named]) {
      const answer = await chat({ tools: [WEATHER_TOOL], tool_choice, parallel_tool_calls: false });
      checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
    }
  },
  "tools auto": async () => {
    const answer = await chat({ messages: HISTORY, tools: [WEATHER_TOOL], max_tokens: 32 });
    check(answer.choices[0].message.content || answer.choices[0].message.tool_calls, answer);
  },
  "tools streamed": async () => {
    const fields = { model: MODEL, messages: QUESTION, tools: [WEATHER_TOOL], tool_choice: named };
    const message = await client.chat.completions.stream(fields).finalMessage();
    checkWeather(message.tool_calls[0].function.arguments);
  },
  "runs tools": async () => {
    let called = 0;
    const run = { ...WEATHER_TOOL.function, parse: JSON.parse, function: () => `${(called += 1)}: rain` };
    const fields = { model: MODEL, messages: QUESTION, tools: [{ type: "function", function: run }], max_tokens: 64 };
    await client.chat.completions.runTools({ ...fields, tool_choice: named }).done();
    check(called === 1, called);
  },
  "JSON schema": async () => {
    const weather = z.object({ city: z.enum(["Oslo", "Lima"]), days: z.number().int().min(1).max(9) });
    const fields = { model: MODEL, messages: QUESTION, response_format: zodResponseFormat(weather, "weather") };
    checkWeather((await client.chat.completions.parse(fields)).choices[0].message.parsed);
    const json_schema = { name: "weather", schema: WEATHER, strict: true };
    const answer = await chat({ response_format: { type: "json_schema", json_schema } });
    checkWeather(answer.choices[0].message.content);
  },
  responses: async () => {
    const answer = await client.responses.create({ model: MODEL, input: QUESTION[0].content, max_output_tokens: 24 });
    check(answer.output_text, answer);
    const function_tool = { type: "function", ...WEATHER_TOOL.function, strict: true };
    const fields = { model: MODEL, input: QUESTION, tools: [function_tool], tool_choice: "required" };
    const streamed = await client.responses.stream({ ...fields, parallel_tool_calls: false }).finalResponse();
    checkWeather(streamed.output.at(-1).arguments);
  },
  logprobs: async () => {
    const answer = await chat({ max_tokens: 4, logprobs: true, top_logprobs: 2 });
    check(answer.choices[0].logprobs.content[0].top_logprobs.length === 2, answer);
  },
});
