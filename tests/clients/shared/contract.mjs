// What the scripts of all clients for Node share, as contract.py does for those in Python.
import { appendFileSync } from "node:fs";

export const API = `${process.env.PACELINE_URL}/v1`;
export const MODEL = process.env.PACELINE_MODEL;
export const KEY = "none";

export const QUESTION = [{ role: "user", content: "What is the weather in Oslo?" }];
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Oslo", "Lima", "Cairo"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
export const WEATHER_TOOL = {
  type: "function",
  function: { name: "get_weather", description: "The weather of a city", parameters: WEATHER },
};
const call = { name: "get_weather", arguments: '{"city": "Oslo", "days": 1}' };
export const HISTORY = [
  ...QUESTION,
  { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: call }] },
  { role: "tool", tool_call_id: "call_1", content: "4 degrees, rain" },
];

export function check(holds, found) {
  if (!holds) throw new Error(`found ${JSON.stringify(found)}`);
}

export function checkWeather(found) {
  const { city, days } = typeof found === "string" ? JSON.parse(found) : found;
  check(WEATHER.properties.city.enum.includes(city) && Number.isInteger(days) && days >= 1 && days <= 9, found);
}

/** Runs functions by ability, and appends a line of JSON for each to the file PACELINE_REPORT. */
export async function report(abilities) {
  for (const [ability, run] of Object.entries(abilities)) {
    const began = Date.now();
    let error = "";
    try {
      await run();
    } catch (problem) {
      console.error(problem);
      error = String(problem);
      process.exitCode = 1;
    }
    const line = JSON.stringify({ ability, error, seconds: (Date.now() - began) / 1000 });
    console.log(line);
    appendFileSync(process.env.PACELINE_REPORT, line + "\n");
  }
}
