'use strict';

const keyListeners = [];  // called when the key has changed

/** Asks for the API key. message: why. Resolves to whether one was given. */
function askForKey(message) {
  const dialog = byId('key-dialog');
  const field = byId('key');
  byId('key-message').textContent = message;
  byId('key-forget').hidden = !apiKey;
  field.value = '';
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    const take = (key) => {
      const isNew = key !== null && key !== apiKey;
      if (key !== null) apiKey = key;
      field.value = '';
      dialog.onclose = null;
      dialog.close();
      resolve(Boolean(key));
      if (isNew) keyListeners.forEach((listener) => listener());
    };
    dialog.querySelector('form').onsubmit = (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (/^[\x21-\x7e]+$/.test(key)) take(key);
      else byId('key-message').textContent = 'A key has letters, digits and signs, and no space.';
    };
    byId('key-cancel').onclick = () => take(null);
    byId('key-forget').onclick = () => take('');
    dialog.onclose = () => take(null);  // Escape
  });
}
