// Shared parts of screens, and dialogs.

import { artifactUrl } from '../api.js';
import { button, h, iconButton } from '../dom.js';
import { bytes, dayAndTime, t } from '../i18n.js';
import { oops } from '../notices.js';

await styled('/static/screens/screens.css');

/** A section with a heading; `id` is the heading's id. */
export const section = (id, title, ...inside) => h('section', { 'aria-labelledby': id }, h('h2', { id, text: title }), inside);

/** An error line with a retry button. */
export const failed = (text, again) =>
  h('p', { class: 'inline-error' }, h('span', { text }), ' ', button({ class: 'text-btn', text: t('retry'), onclick: again }));

export const when = (at) => h('time', { class: 'meta', datetime: at ?? '', text: dayAndTime(at) });

/** A table whose first column names the row; on a narrow screen each row becomes a block. */
export const table = (label, heads, rows) =>
  h('div', { class: 'table-frame', tabindex: '0', role: 'group', 'aria-labelledby': label },
    h('table', {}, h('thead', {}, h('tr', {}, heads.map((text) => h('th', { scope: 'col', text })))),
      h('tbody', {}, rows.map(([first, ...cells]) => h('tr', {}, h('th', { scope: 'row', dir: 'auto', text: first }), cells.map((text, at) => h('td', { text, data: { of: heads[at + 1] } })))))));

let count = 0;
export const newName = (stem) => `${stem}-${(count += 1)}`;

/** A labelled checkbox. */
export function toggle(label, checked, changed) {
  const box = h('input', { type: 'checkbox' });
  box.checked = checked;
  box.addEventListener('change', () => changed(box.checked));
  return h('label', { class: 'check' }, box, h('span', { text: label }));
}

export function field(label, input, hint) {
  input.id ||= newName('field');
  input.classList.add('field');
  const hintLine = hint && h('span', { class: 'hint', id: `${input.id}-hint`, text: hint });
  if (hintLine) input.setAttribute('aria-describedby', hintLine.id);
  return h('div', { class: 'form-field' }, h('label', { for: input.id, text: label }), input, hintLine);
}

export function choice(options, value, changed) {
  const select = h('select', {}, options.map(([id, text]) => h('option', { value: id, text })));
  select.value = value;
  select.addEventListener('change', () => changed(select.value));
  return select;
}

/** Runs `work` with the button marked busy; shows an error and enables the button again. */
export async function busy(el, work) {
  if (el.getAttribute('aria-disabled') === 'true') return;
  const label = el.textContent;
  el.setAttribute('aria-disabled', 'true');
  el.textContent = t('oneMoment');
  try {
    await work();
  } catch (error) {
    oops(error);
  } finally {
    el.removeAttribute('aria-disabled');
    el.textContent = label;
  }
}

/** Loads a style sheet that only some screens need. */
export function styled(href) {
  const link = h('link', { rel: 'stylesheet', href });
  const there = new Promise((resolve) => {
    link.addEventListener('load', resolve);
    link.addEventListener('error', resolve);
  });
  document.head.append(link);
  return there;
}

// Dialogs. The browser's dialog element traps and restores the focus, and closes on Escape.

/** Shows `content` under a heading; `closed` is called when the dialog closes for any reason. */
export function openDialog(title, content, { wide = false, closed = () => {} } = {}) {
  const id = newName('dialog');
  const close = () => el.close();
  const el = h(
    'dialog',
    { class: wide ? 'modal wide' : 'modal', 'aria-labelledby': id },
    h('header', { class: 'modal-head' }, h('h2', { id, text: title, dir: 'auto' }), iconButton('close', t('close'), { onclick: close })),
    h('div', { class: 'modal-body' }, content),
  );
  el.addEventListener('close', () => {
    el.remove();
    closed();
  });
  // A click on the backdrop has the dialog as its target.
  el.addEventListener('click', (event) => event.target === el && close());
  document.body.append(el);
  el.showModal();
  return { el, close };
}

/** Asks for confirmation; resolves to true or false. `means`: what will happen, in a sentence. */
export function confirm(question, yes, means) {
  return new Promise((resolve) => {
    let said = false;
    const no = button({ class: 'plain-btn', text: t('cancel'), onclick: () => close() });
    const go = () => {
      said = true;
      close();
    };
    const { close } = openDialog(
      question,
      [means && h('p', { text: means }), h('div', { class: 'modal-foot' }, no, button({ class: 'plain-btn danger', text: yes, onclick: go }))].filter(Boolean),
      { closed: () => resolve(said) },
    );
    no.focus();
  });
}

/** One picture, fitted to the window or in full size. */
export function openImage({ artifactRef, filename, mimeType, size }) {
  const picture = h('img', { src: artifactUrl(artifactRef), alt: filename });
  const frame = h('div', { class: 'picture', tabindex: '0', role: 'group', 'aria-label': filename }, picture);
  const whole = button({ class: 'plain-btn', text: t('imageFull'), 'aria-pressed': 'false', onclick: () => whole.setAttribute('aria-pressed', frame.classList.toggle('full')) });
  const about = h('span', { class: 'meta', text: [mimeType, size !== undefined && bytes(size)].filter(Boolean).join(' · ') });
  const save = h('a', { class: 'plain-btn', href: artifactUrl(artifactRef), download: filename, text: t('downloadFile') });
  return openDialog(filename, [frame, h('div', { class: 'modal-foot' }, about, whole, save)], { wide: true });
}
