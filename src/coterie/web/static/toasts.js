// Short notices, in the flow above the composer. Information goes by itself, an error stays until it is closed.

import { button, h, iconButton } from './dom.js';
import { t } from './i18n.js';
import { alert } from './announce.js';
import { region } from './shell.js';

const INFO_MS = 5_000;
const MOST = 4;

/** `kind`: info or error. `retry` adds a button. Returns how to close it. */
export function toast({ kind = 'info', text, retry, action }) {
  const root = region('toasts');
  const el = h('div', { class: `toast toast-${kind}`, 'data-testid': 'toast', data: { kind } }, h('span', { class: 'toast-text', dir: 'auto' }, text));
  let left = INFO_MS;
  let since = 0;
  let timer = null;

  const close = () => {
    clearTimeout(timer);
    if (el.contains(document.activeElement)) document.getElementById('composer')?.focus();
    el.remove();
  };
  const run = () => {
    since = performance.now();
    timer = setTimeout(close, left);
  };
  const rest = () => {
    clearTimeout(timer);
    left = Math.max(1000, left - (performance.now() - since));
  };
  const act = (what) => () => {
    close();
    what();
  };
  if (action) el.append(button({ class: 'text-btn', onclick: act(action.run) }, action.label));
  if (retry) el.append(button({ class: 'text-btn', 'data-testid': 'toast-retry', onclick: act(retry) }, t('retry')));
  el.append(iconButton('close', t('close'), { 'data-testid': 'toast-close', onclick: close }));
  if (kind === 'error') alert(text);
  else {
    el.setAttribute('role', 'status');
    for (const type of ['mouseenter', 'focusin']) el.addEventListener(type, rest);
    for (const type of ['mouseleave', 'focusout']) el.addEventListener(type, run);
    run();
  }
  root.append(el);
  while (root.children.length > MOST) root.firstChild.remove();
  return close;
}

/** Puts a text into the clipboard; by a selection where there is no clipboard to write to. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const back = document.activeElement;
    const area = h('textarea', { class: 'vh', 'aria-hidden': 'true' });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    back?.focus();
  }
  toast({ text: t('copied') });
}
