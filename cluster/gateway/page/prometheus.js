'use strict';

/** Samples of Prometheus' text format by name: lists of { labels, value }. */
function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split('\n')) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const [, name, inner = '', value] = match;
    const labels = {};
    for (const [, label, escaped] of inner.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[label] = escaped.replace(/\\(.)/g, (_, sign) => (sign === 'n' ? '\n' : sign));
    }
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value) });
  }
  return samples;
}

/** Sums and maxima over the processes that a page of metrics comes from. */
class Metrics {
  constructor(text) {
    this.samples = parseMetrics(text);
    this.readAt = performance.now();
  }

  values(name) {
    return (this.samples.get(name) ?? []).map((sample) => sample.value);
  }

  sum(name) {
    return this.values(name).reduce((total, value) => total + value, 0);
  }

  most(name) {
    return Math.max(0, ...this.values(name));
  }

  count(name) {
    return this.values(name).length;
  }

  /** Sums by the values of a label. */
  by(name, label) {
    const sums = new Map();
    for (const { labels, value } of this.samples.get(name) ?? []) {
      sums.set(labels[label], (sums.get(labels[label]) ?? 0) + value);
    }
    return sums;
  }
}
