'use strict';

/** Speed of one answer. Tokens and rounds are counted from the stream until the server tells them. */
class Speed {
  constructor() {
    this.begun = performance.now();
    this.tokens = 0;
    this.rounds = 0;
    this.firstTokens = 0;
    this.firstAt = null;
    this.lastAt = null;
  }

  /** pairs: of new text; null: the server does not tell. */
  add(pairs) {
    this.lastAt = performance.now();
    this.tokens += pairs?.length ?? 0;
    this.rounds += pairs?.filter(([, source]) => source === TARGET).length ?? 0;  // each adds one of the target's
    if (this.firstAt !== null) return;
    this.firstAt = this.lastAt;
    this.firstTokens = Math.max(1, this.tokens);
  }

  finish(usage, stats) {
    if (usage) this.tokens = usage.completion_tokens;
    if (stats) this.rounds = stats.rounds;
  }

  /** From the first tokens on: waiting and the prompt do not count. Null: too short to tell. */
  get perSecond() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0.01 && this.tokens > this.firstTokens ? (this.tokens - this.firstTokens) / seconds : null;
  }

  show(element) {
    const facts = [plural(this.tokens, 'token')];
    if (this.rounds) facts.push(`${(this.tokens / this.rounds).toFixed(2)} tokens a round`);
    if (this.firstAt !== null) facts.push(`first token after ${Math.round(this.firstAt - this.begun)} ms`);
    const speed = this.perSecond === null ? [] : [make('strong', {}, `${this.perSecond.toFixed(1)} tokens/s`), ' · '];
    element.replaceChildren(...speed, facts.join(' · '));
  }
}

/** One answer on the page: its text, the legend and the line of its speed. */
class Run {
  constructor(speculates) {
    this.speculates = speculates;
    this.content = '';  // what the conversation goes on with
    this.shown = '';  // that and what the model thought, as it wrote it
    this.isWhole = false;
    this.coloured = new ColouredText();
    this.speed = new Speed();
    this.line = make('p', { className: 'speed' });
    const title = speculates ? 'With speculation' : 'Plain decoding';
    this.element = make('div', { className: 'run running', 'aria-busy': 'true' }, make('h3', {}, title));
    this.element.append(this.coloured.element, this.line);
  }

  /** Reads the answer to a request to its end. Throws ServerError, or AbortError. */
  async read(request, signal) {
    this.speed = new Speed();
    try {
      let usage = null;
      let stats = null;
      for await (const chunk of eventsOf(await ask('v1/chat/completions', request, signal))) {
        const choice = chunk.choices[0];
        if (choice) this.take(choice);
        usage = chunk.usage ?? usage;
        stats = chunk.speculation ?? stats;
      }
      this.speed.finish(usage, stats);
      this.speed.show(this.line);
      this.isWhole = true;
    } finally {
      this.element.classList.remove('running');
      this.element.setAttribute('aria-busy', 'false');
    }
  }

  take(choice) {
    const { content = '', reasoning_content: thought = '' } = choice.delta;
    const pairs = choice.token_sources ?? null;
    this.content += content;
    const text = pairs === null ? thought + content : pairs.map(([part]) => part).join('');
    if (!text) return;
    this.shown += text;
    this.coloured.add(text, pairs);
    this.speed.add(pairs);
    if (pairs !== null) this.speed.show(this.line);
  }
}

/** What two answers to the same request say about speed and text. */
function comparison(runs) {
  const fast = runs.find((run) => run.speculates)?.speed.perSecond;
  const plain = runs.find((run) => !run.speculates)?.speed.perSecond;
  if (!fast || !plain || !runs.every((run) => run.isWhole)) return null;
  const isSame = runs.every((run) => run.shown === runs[0].shown);
  const times = `${fast.toFixed(1)} tokens/s with speculation, ${plain.toFixed(1)} without: ${(fast / plain).toFixed(2)} times as fast.`;
  return `${times} ${isSame ? 'Both texts are the same.' : 'The texts differ.'}`;
}
