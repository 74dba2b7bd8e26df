// The small things that screens are made of.

import { button, h } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';
import { oops } from '../notices.js';

await styled('/static/screens/screens.css');

export const empty = (text, ...more) => h('div', { class: 'empty' }, h('p', { text }), more);

/** A line that says what was not fetched, with another try. */
export const failed = (text, again) =>
  h('p', { class: 'inline-error' }, h('span', { text }), ' ', button({ class: 'text-btn', text: t('retry'), onclick: again }));

export const when = (at) => h('time', { class: 'meta', datetime: at ?? '', text: dayAndTime(at) });

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
  const told = hint && h('span', { class: 'hint', id: `${input.id}-hint`, text: hint });
  if (told) input.setAttribute('aria-describedby', told.id);
  return h('div', { class: 'form-field' }, h('label', { for: input.id, text: label }), input, told);
}

export function choice(options, value, changed, props = {}) {
  const select = h('select', props, options.map(([id, text]) => h('option', { value: id, text })));
  select.value = value;
  if (changed) select.addEventListener('change', () => changed(select.value));
  return select;
}

/** While `work` goes on the button says so; what went wrong is told, and it can be pressed again. */
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

/** Screens bring their own rules when the first of them is opened. */
function styled(href) {
  const link = h('link', { rel: 'stylesheet', href });
  const there = new Promise((resolve) => {
    link.addEventListener('load', resolve);
    link.addEventListener('error', resolve);
  });
  document.head.append(link);
  return there;
}
