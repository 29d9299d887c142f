'use strict';

const TARGET = 'target';
const hues = new Map([  // drafters have the same colour in every answer
  ['draft_model', 0], ['suffix', 1], ['soft_ngram', 2], ['cache', 3], ['grammar', 4],
  ['prediction', 5], ['retrieval', 6], ['eagle', 7], ['ouroboros', 8], ['lookahead', 9],
]);

/** Classes of what is coloured as this source's; none for the target's own. */
function sourceClass(source) {
  if (source === TARGET) return '';
  if (!hues.has(source)) hues.set(source, hues.size % 10);
  return `drafted hue-${hues.get(source)}`;
}

const swatch = (source) => make('span', { className: `swatch ${sourceClass(source)}` });

/** The text of one answer, coloured by source, with a legend that counts tokens. */
class ColouredText {
  constructor() {
    this.text = make('div', { className: 'text' });
    this.legend = make('ul', { className: 'legend', 'aria-label': 'Who proposed the tokens' });
    this.element = make('div', {}, this.text, this.legend);
    this.counts = new Map();  // source: [tokens, element that shows them]
  }

  /** pairs: [text, source] for each token; null: the server does not tell. */
  add(text, pairs) {
    if (pairs === null) {
      this.text.append(text);
      return;
    }
    let run = '';
    pairs.forEach(([part, source], index) => {
      run += part;
      this.count(source);
      if (index + 1 < pairs.length && pairs[index + 1][1] === source) return;
      const className = sourceClass(source);
      this.text.append(className ? make('span', { className, title: source, 'data-source': source }, run) : run);
      run = '';
    });
  }

  count(source) {
    if (!this.counts.has(source)) {
      const number = make('span', { className: 'number' });
      this.counts.set(source, [0, number]);
      this.legend[source === TARGET ? 'prepend' : 'append'](make('li', {}, this.entry(source, number)));
    }
    const entry = this.counts.get(source);
    entry[0] += 1;
    entry[1].textContent = entry[0].toLocaleString('en');
  }

  entry(source, number) {
    const content = [swatch(source), source === TARGET ? 'target model' : source, number];
    if (source === TARGET) return make('span', { className: 'own' }, ...content);
    const button = make('button', { type: 'button', 'aria-pressed': 'false', title: 'Show this drafter alone' }, ...content);
    button.onclick = () => this.choose(button.getAttribute('aria-pressed') === 'true' ? null : source, button);
    return button;
  }

  choose(source, pressed) {
    this.element.classList.toggle('dimmed', source !== null);
    for (const part of this.text.children) part.classList.toggle('chosen', part.dataset.source === source);
    for (const button of this.legend.querySelectorAll('button')) {
      button.setAttribute('aria-pressed', String(button === pressed && source !== null));
    }
  }
}
