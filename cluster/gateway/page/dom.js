'use strict';

const byId = (id) => document.getElementById(id);

/** A new element. Properties with a hyphen, and `role`, are attributes; strings among the children become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role') element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Acts once the page has been painted, so that the first paint waits for nothing. */
function afterFirstPaint(action) {
  const observer = new PerformanceObserver(() => {
    observer.disconnect();
    action();
  });
  observer.observe({ type: 'paint', buffered: true });
}

const plural = (count, word) => `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
