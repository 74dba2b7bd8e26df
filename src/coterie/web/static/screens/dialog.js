// Things that lie over the page. The browser's own dialog keeps the focus inside, gives it back, and closes on Escape.

import { artifactUrl } from '../api.js';
import { button, h, iconButton } from '../dom.js';
import { bytes, t } from '../i18n.js';
import { newName } from './parts.js';

/** Shows `content` under a heading; `closed` is called at the end, whatever ended it. */
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
  // A click on the dark around it is one on the dialog itself.
  el.addEventListener('click', (event) => event.target === el && close());
  document.body.append(el);
  el.showModal();
  return { el, close };
}

/** Asks before something that cannot be undone; resolves to yes or no. */
export function confirm(question, { yes, danger = true } = {}) {
  return new Promise((resolve) => {
    let said = false;
    const answer = (value) => () => {
      said = value;
      close();
    };
    const no = button({ class: 'plain-btn', text: t('cancel'), onclick: answer(false), autofocus: true });
    const { close } = openDialog(
      question,
      h('div', { class: 'modal-foot' }, no, button({ class: danger ? 'plain-btn danger' : 'primary', text: yes, onclick: answer(true) })),
      { closed: () => resolve(said) },
    );
    no.focus();
  });
}

/** One picture, as large as the window or as large as it is. */
export function openImage({ artifactRef, filename, mimeType, size }) {
  const picture = h('img', { src: artifactUrl(artifactRef), alt: filename });
  const frame = h('div', { class: 'picture', tabindex: '0', role: 'group', 'aria-label': filename }, picture);
  const whole = button({ class: 'plain-btn', text: t('imageFull'), 'aria-pressed': 'false' });
  whole.addEventListener('click', () => {
    const full = frame.classList.toggle('full');
    whole.setAttribute('aria-pressed', String(full));
  });
  const about = h('span', { class: 'meta', text: [mimeType, size !== undefined && bytes(size)].filter(Boolean).join(' · ') });
  const save = h('a', { class: 'plain-btn', href: artifactUrl(artifactRef), download: filename, text: t('downloadFile') });
  return openDialog(filename, [frame, h('div', { class: 'modal-foot' }, about, whole, save)], { wide: true });
}
