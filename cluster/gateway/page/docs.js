'use strict';

const code = (text) => make('code', {}, text);
const anchorOf = (name) => `schema-${name}`;
const nameOf = (reference) => reference.split('/').pop();

/** Nodes separated by text. */
const separated = (lists, text) => lists.flatMap((nodes, index) => (index ? [text, ...nodes] : nodes));

/** A type as nodes; types that have a name are links to their section. */
function typeNodes(schema) {
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return [make('a', { href: `#${anchorOf(name)}` }, name)];
  }
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return separated(options.map(typeNodes), ' or ');
  if (schema.enum) return separated(schema.enum.map((value) => [code(JSON.stringify(value))]), ', ');
  if (schema.const !== undefined) return [code(JSON.stringify(schema.const))];
  if (schema.type === 'array') {
    const items = schema.prefixItems ? separated(schema.prefixItems.map(typeNodes), ', ') : typeNodes(schema.items ?? {});
    return ['list of ', ...items, ...limitNodes(schema)];
  }
  return [schema.type ?? 'any value', ...limitNodes(schema)];
}

const limits = [
  ['minimum', 'at least', ''], ['exclusiveMinimum', 'above', ''], ['maximum', 'at most', ''], ['exclusiveMaximum', 'below', ''],
  ['minLength', 'at least', ' characters'], ['maxLength', 'at most', ' characters'],
  ['minItems', 'at least', ' items'], ['maxItems', 'at most', ' items'], ['pattern', 'like', ''],
];

/** Integers that JavaScript cannot hold are powers of two here. */
function limitText(value) {
  if (typeof value !== 'number' || Number.isSafeInteger(value) || !Number.isInteger(value)) return value;
  return `${value < 0 ? '-' : ''}2^${Math.log2(Math.abs(value))}`;
}

function limitNodes(schema) {
  const told = limits.filter(([key]) => schema[key] !== undefined)
    .map(([key, words, unit]) => `${words} ${limitText(schema[key])}${unit}`);
  return told.length ? [` (${told.join(', ')})`] : [];
}

function fieldTable(schema) {
  const required = new Set(schema.required);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const type = make('td', {}, ...typeNodes(field));
    if (field.default !== undefined && field.default !== null) type.append(', default ', code(JSON.stringify(field.default)));
    if (field.description) type.append(make('div', { className: 'quiet' }, field.description));
    return make('tr', {}, make('td', {}, code(name), required.has(name) ? ' (required)' : ''), type);
  });
  if (!rows.length) return make('p', {}, ...typeNodes(schema));
  const heads = ['Field', 'Type and meaning'].map((text) => make('th', { scope: 'col' }, text));
  return make('table', {}, make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...rows));
}

const describe = (text) => (text ? [make('p', { className: 'description' }, text)] : []);

function endpoint(method, path, operation) {
  const title = make('h3', {}, make('span', { className: 'method' }, method.toUpperCase()), code(path));
  const section = make('section', {}, title, ...describe(operation.description));
  const body = operation.requestBody?.content?.['application/json']?.schema;
  if (body) section.append(make('p', {}, 'Body: ', ...typeNodes(body)));
  for (const parameter of operation.parameters ?? []) {
    const type = typeNodes(parameter.schema ?? {});
    section.append(make('p', {}, `In the ${parameter.in}: `, code(parameter.name), ', ', ...type));
  }
  return section;
}

function show(document_) {
  byId('version').textContent = document_.info.version;
  const endpoints = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => endpoint(method, path, operation)));
  const schemas = Object.entries(document_.components?.schemas ?? {}).map(([name, schema]) =>
    make('section', { id: anchorOf(name) }, make('h3', {}, name), ...describe(schema.description), fieldTable(schema)));
  byId('content').replaceChildren(make('h2', {}, 'Endpoints'), ...endpoints, make('h2', {}, 'Types'), ...schemas);
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

async function read() {
  const content = byId('content');
  try {
    show(await (await ask('openapi.json')).json());
  } catch (error) {
    if (error.status === 401 && await askForKey(error.message)) {
      await read();
      return;
    }
    const again = make('button', { type: 'button', onclick: read }, 'Try again');
    content.replaceChildren(errorBox(error), again);
  }
  content.setAttribute('aria-busy', 'false');
}

afterFirstPaint(read);
