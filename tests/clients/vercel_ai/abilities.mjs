// Vercel's AI SDK, with its provider for servers of OpenAI's API.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { API, KEY, MODEL, check, checkWeather, report } from "./contract.mjs";

const settings = { name: "paceline", baseURL: API, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
const model = createOpenAICompatible(settings)(MODEL);
const asked = { model, prompt: "What is the weather in Oslo?", maxOutputTokens: 64, maxRetries: 0 };
const weather = z.object({ city: z.enum(["Oslo", "Lima", "Cairo"]), days: z.number().int().min(1).max(9) });
const described = { description: "The weather of a city", inputSchema: weather };
const output = Output.object({ schema: weather });

await report({
  plain: async () => {
    const answer = await generateText(asked);
    check(answer.text && answer.usage.outputTokens, answer);
  },
  stream: async () => {
    const answer = streamText(asked);
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    check(text && (await answer.usage).outputTokens, text);
  },
  "tools forced": async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
      const answer = await generateText({ ...asked, tools: { get_weather: tool(described) }, toolChoice });
      checkWeather(answer.toolCalls[0].input);
    }
  },
  "tools auto": async () => {
    let called = 0;
    const execute = async () => `${(called += 1)}: rain`;
    const answer = await generateText({
      ...asked,
      tools: { get_weather: tool({ ...described, execute }) },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "get_weather" } : "auto" }),
      stopWhen: isStepCount(2),
    });
    check(called === 1 && answer.steps.length === 2, answer.steps);
  },
  "tools streamed": async () => {
    const answer = streamText({ ...asked, tools: { get_weather: tool(described) }, toolChoice: "required" });
    checkWeather((await answer.toolCalls)[0].input);
  },
  "JSON schema": async () => {
    checkWeather((await generateText({ ...asked, output })).output);
  },
  responses: async () => {
    const responding = { ...asked, model: createOpenAI({ baseURL: API, apiKey: KEY }).responses(MODEL) };
    check((await generateText(responding)).text, "no text");
    checkWeather((await generateText({ ...responding, output })).output);
    let text = "";
    for await (const piece of streamText(responding).textStream) text += piece;
    check(text, text);
  },
  messages: async () => {
    const messaging = { ...asked, model: createAnthropic({ baseURL: API, apiKey: KEY })(MODEL) };
    check((await generateText(messaging)).text, "no text");
    const called = { ...messaging, tools: { get_weather: tool(described) }, toolChoice: "required" };
    checkWeather((await generateText(called)).toolCalls[0].input);
  },
  "objects streamed": async () => {
    const answer = streamText({ ...asked, output });
    let last;
    for await (const part of answer.partialOutputStream) last = part;
    checkWeather(last);
  },
});
