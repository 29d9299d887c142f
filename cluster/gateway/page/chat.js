'use strict';

let turns = [];
let running = null;  // the AbortController of the answer in progress

/** A message, the answers to it with and without speculation, and what went wrong. */
class Turn {
  constructor(said) {
    this.said = said;
    this.runs = [];
    this.request = null;
    this.trouble = null;
    this.answers = make('div', { className: 'runs' });
    this.compared = make('p', { className: 'compared', hidden: true });
    this.other = make('button', { type: 'button', hidden: true, onclick: () => this.run(!this.runs[0].speculates) });
    this.element = make('article', { className: 'turn', 'aria-label': 'Message and answer' });
    this.element.append(make('div', { className: 'said' }, said), this.answers, this.compared);
    this.element.append(make('div', { className: 'row' }, this.other));
  }

  /** The answer that the conversation goes on with. */
  get answer() {
    return this.runs[0]?.content ?? '';
  }

  async run(speculates) {
    if (running) return;
    running = new AbortController();
    this.trouble?.remove();
    if (this.runs.length === 2) this.runs.pop().element.remove();  // it was not completed
    this.other.hidden = true;
    const run = new Run(speculates);
    this.runs.push(run);
    this.answers.append(run.element);
    this.answers.classList.toggle('both', this.runs.length > 1);
    showRunning(true);
    let error = null;
    try {
      await run.read({ ...this.request, speculation: speculationOf(speculates) }, running.signal);
      say('The answer is complete.');
    } catch (caught) {
      error = caught;
    }
    running = null;
    showRunning(false);
    if (error) await this.recover(run, error);
    this.offer();
  }

  /** After a run that did not come to its end: what there is of it stays. */
  async recover(run, error) {
    if (!run.shown) {
      this.runs.pop();
      run.element.remove();
    }
    if (error.name === 'AbortError') {
      say('Stopped.');
      return;
    }
    if (error.status === 401 && await askForKey(error.message)) {
      await this.run(run.speculates);
      return;
    }
    const again = make('button', { type: 'button', onclick: () => this.run(run.speculates) }, 'Try again');
    const box = errorBox(error instanceof ServerError ? error : new ServerError(`This page failed: ${error.message}`));
    if (!run.shown) box.append(again);
    this.trouble = box;
    this.element.append(box);
    keepEndInView();
  }

  /** Offers the answer that is missing for a comparison, or compares. */
  offer() {
    const [first, second] = this.runs;
    this.other.hidden = !first?.isWhole || Boolean(second?.isWhole);
    this.other.textContent = first?.speculates ? 'Run without speculation' : 'Run with speculation';
    const words = this.runs.length === 2 ? comparison(this.runs) : null;
    this.compared.hidden = words === null;
    this.compared.textContent = words ?? '';
    keepEndInView();
  }
}

const speculationOf = (enabled) => ({ enabled, stats: true, token_sources: true });

function say(words) {
  byId('status').textContent = words;
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === byId('stop') || document.activeElement === document.body;
  byId('send').hidden = isRunning;
  byId('stop').hidden = !isRunning;
  byId('new').disabled = isRunning;
  for (const turn of turns) turn.other.disabled = isRunning;
  if (isRunning) say('Answering.');
  else if (hadFocus) byId('prompt').focus();
}

let followsEnd = true;  // false while the reader has scrolled up

function keepEndInView() {
  const log = byId('log');
  if (followsEnd) log.scrollTop = log.scrollHeight;
}

/** What the options say, and the conversation so far. The seed makes answers with and without speculation comparable. */
function requestFor(said) {
  const messages = [];
  if (byId('system').value) messages.push({ role: 'system', content: byId('system').value });
  for (const turn of turns) {
    if (!turn.answer) continue;
    messages.push({ role: 'user', content: turn.said }, { role: 'assistant', content: turn.answer });
  }
  messages.push({ role: 'user', content: said });
  const request = { messages, stream: true, stream_options: { include_usage: true } };
  request.seed = crypto.getRandomValues(new Uint32Array(1))[0];
  if (byId('temperature').value) request.temperature = Number(byId('temperature').value);
  if (byId('max-tokens').value) request.max_tokens = Number(byId('max-tokens').value);
  return request;
}

function send() {
  const said = byId('prompt').value;
  if (running || !said.trim()) return;
  const turn = new Turn(said);
  turn.request = requestFor(said);
  turns.push(turn);
  byId('welcome').hidden = true;
  byId('log').append(turn.element);
  byId('prompt').value = '';
  byId('options').open = false;
  followsEnd = true;
  turn.run(byId('speculates').checked);
}

function stop() {
  running?.abort();
}

async function showModel() {
  const shown = byId('model');
  try {
    const [model] = (await (await ask('v1/models')).json()).data;
    shown.textContent = `${model.id} · ${plural(model.max_model_len, 'token')}`;
  } catch (error) {
    shown.textContent = error.status === 401 ? 'This server asks for an API key' : error.message;
  }
}

byId('composer').onsubmit = (event) => {
  event.preventDefault();
  send();
};
byId('prompt').onkeydown = (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.isComposing || byId('key-dialog').open) return;
  if (byId('options').open) {
    byId('options').open = false;
    byId('options').querySelector('summary').focus();
  } else {
    stop();
  }
});
byId('stop').onclick = stop;
byId('new').onclick = () => {
  turns.forEach((turn) => turn.element.remove());
  turns = [];
  byId('welcome').hidden = false;
  byId('prompt').focus();
};
byId('log').onscroll = ({ target }) => {
  followsEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
};
new MutationObserver(keepEndInView).observe(byId('log'), { childList: true, subtree: true });
byId('key-button').onclick = () => askForKey('');
keyListeners.push(showModel);
afterFirstPaint(showModel);
byId('prompt').focus();
