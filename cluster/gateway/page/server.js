'use strict';

let apiKey = '';  // here and nowhere else: no storage, no address, no cookie

/** What the server answered instead of a result. status 0: no answer came. */
class ServerError extends Error {
  constructor(message, status = 0, detail = '') {
    super(message);
    this.status = status;
    this.detail = detail;
  }

  /** From OpenAI's error object, or any other text. */
  static from(text, status, retryAfter = null) {
    let error = null;
    try {
      error = JSON.parse(text).error;
    } catch { /* a proxy's own text */ }
    const facts = [status ? `HTTP ${status}` : 'the stream ended', error?.type, error?.code, error?.param];
    if (retryAfter) facts.push(`retry after ${retryAfter} s`);
    const message = error?.message || text.slice(0, 500) || 'The server gave no reason.';
    return new ServerError(message, status, facts.filter(Boolean).join(' · '));
  }
}

/** The response to a GET, or to a POST of `body` as JSON. Throws ServerError, or AbortError after `signal`. */
async function ask(path, body = undefined, signal = undefined) {
  const headers = {};
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? 'GET' : 'POST', headers, body: JSON.stringify(body), signal, cache: 'no-store',
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('The server cannot be reached.');
  }
  if (!response.ok) {
    throw ServerError.from(await response.text(), response.status, response.headers.get('Retry-After'));
  }
  return response;
}

/** The objects of a stream of server-sent events, up to `[DONE]`. Throws ServerError, or AbortError. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError('The connection was closed before the answer was complete.');
      text += value;
      const events = text.split('\n\n');
      text = events.pop();
      for (const event of events) {
        const data = event.startsWith('data: ') ? event.slice(6) : '';
        if (data === '[DONE]') return;
        if (!data) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw ServerError.from(data, 0);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError('The connection to the server was lost.');
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** An element that shows an error in the server's words. */
function errorBox(error) {
  const box = make('div', { className: 'error', role: 'alert' }, make('p', {}, error.message));
  if (error.detail) box.append(make('p', { className: 'quiet' }, error.detail));
  return box;
}
