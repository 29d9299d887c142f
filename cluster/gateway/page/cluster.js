'use strict';

const METRICS_PERIOD_MS = 2000;

let lastMetrics = null;
let nextLook = null;  // the timer of the next look at /metrics; null: none is due

const numberOf = (value) => Math.round(value).toLocaleString('en');
const shareOf = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : '–');

function facts(title, rows) {
  const body = rows.map(([name, value]) => make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, value)));
  return [make('h3', {}, title), make('table', {}, make('tbody', {}, ...body))];
}

/** Accepted and verified draft tokens of every drafter that has drafted. */
function draftTable(metrics) {
  const drafted = metrics.by('paceline_spec_decode_num_draft_tokens_total', 'source');
  const accepted = metrics.by('paceline_spec_decode_num_accepted_tokens_total', 'source');
  const rows = [...drafted].filter(([, count]) => count > 0).sort(([a], [b]) => (accepted.get(b) ?? 0) - (accepted.get(a) ?? 0));
  const body = rows.map(([source, count]) => {
    const hits = accepted.get(source) ?? 0;
    const cells = [numberOf(hits), numberOf(count), shareOf(hits, count)].map((text) => make('td', {}, text));
    return make('tr', {}, make('th', { scope: 'row' }, swatch(source), source), ...cells);
  });
  if (!body.length) return [make('h3', {}, 'Drafts by source'), make('p', { className: 'quiet' }, 'No drafts yet.')];
  const heads = ['Drafter', 'Accepted', 'Verified', 'Share'].map((text) => make('th', { scope: 'col' }, text));
  const table = make('table', {}, make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...body));
  return [make('h3', {}, 'Draft tokens by source'), table];
}

function figures(metrics, before) {
  const seconds = before ? (metrics.readAt - before.readAt) / 1000 : 0;
  const made = before ? metrics.sum('paceline_emitted_tokens_total') - before.sum('paceline_emitted_tokens_total') : 0;
  const blocks = metrics.sum('paceline_kv_blocks');
  const used = blocks - metrics.sum('paceline_kv_blocks_free');
  const serving = [
    ['Target groups', `${metrics.sum('paceline_target_connected')} of ${metrics.count('paceline_target_connected')}`],
    ['Draft workers', numberOf(metrics.most('paceline_draft_workers'))],
    ['Tokens/s', seconds > 0 && made >= 0 ? (made / seconds).toFixed(1) : '–'],
  ];
  const queue = [
    ['Running', numberOf(metrics.sum('paceline_sequences_running'))],
    ['Waiting', numberOf(metrics.sum('paceline_sequences_waiting'))],
    ['Refused', numberOf(metrics.sum('paceline_requests_refused_total'))],
    ['KV blocks in use', shareOf(used, blocks)],
  ];
  const cache = [
    ['Hits (tokens accepted)', numberOf(metrics.by('paceline_spec_decode_num_accepted_tokens_total', 'source').get('cache') ?? 0)],
    ['Tokens to draft from', numberOf(metrics.sum('paceline_cache_index_tokens'))],
    ['Namespaces', numberOf(metrics.sum('paceline_cache_index_namespaces'))],
  ];
  const parts = [...facts('Serving', serving), ...facts('Requests', queue), ...draftTable(metrics)];
  if (metrics.count('paceline_cache_index_tokens')) parts.push(...facts('Shared cache', cache));
  return parts;
}

function metricsTrouble(error) {
  if (![401, 403, 404].includes(error.status)) return [errorBox(error)];
  const again = make('button', { type: 'button', onclick: look }, 'Try again');
  const words = `Metrics are not on this port: the server answered ${error.status}.`;
  return [make('p', {}, words), make('p', { className: 'quiet' }, error.message), again];
}

const isWatched = () => !byId('cluster').hidden && document.visibilityState === 'visible';

/** Reads the metrics now, and again in a while as long as somebody sees them. */
async function look() {
  clearTimeout(nextLook);
  nextLook = null;
  if (!isWatched()) return;
  let isRefused = false;
  try {
    const metrics = new Metrics(await (await ask('metrics')).text());
    byId('figures').replaceChildren(...figures(metrics, lastMetrics));
    lastMetrics = metrics;
  } catch (error) {
    isRefused = [401, 403, 404].includes(error.status);
    byId('figures').replaceChildren(...metricsTrouble(error));
  }
  clearTimeout(nextLook);  // two looks may have met
  nextLook = isRefused ? null : setTimeout(look, METRICS_PERIOD_MS);
}

function showCluster(isShown) {
  byId('cluster').hidden = !isShown;
  byId('cluster-button').setAttribute('aria-expanded', String(isShown));
  look();
}

byId('cluster-button').onclick = () => showCluster(byId('cluster').hidden);
document.addEventListener('visibilitychange', look);
keyListeners.push(look);
if (matchMedia('(min-width: 901px)').matches) afterFirstPaint(() => showCluster(true));
