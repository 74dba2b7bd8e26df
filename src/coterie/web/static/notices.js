// Notices, and announcements for screen readers: one line per finished message, never streamed text.

import { button, h, iconButton, toComposer } from './dom.js';
import { reasonOf, t } from './i18n.js';
import { addressed, nameOf, plainText, optionsOf, PERSON, SYSTEM, threadOf, watchers } from './state.js';
import { region } from './shell.js';

const STAYS_MS = 1_000;
const OTHERS_MS = 5_000;
const LONG_MS = 3_000;
const LONGEST = 200;
const INFO_MS = 5_000;
const MOST = 4;

const log = h('div', { role: 'log', class: 'vh', 'aria-live': 'polite', 'data-testid': 'live-log' });
const alerts = h('div', { role: 'alert', class: 'vh', 'data-testid': 'live-alert' });
let othersAt = -OTHERS_MS;
const started = new Map();

export function start() {
  watchers.add(heard);
}
document.body.append(h('div', { class: 'live' }, log, alerts));

const announce = (text) => put(log, text);

function put(root, text) {
  const line = h('p', {}, text);
  root.append(line);
  setTimeout(() => line.remove(), STAYS_MS);
}

function heard(kind, data) {
  if (kind === 'draft.started' && addressed() === data.agent) {
    started.set(data.draftId, setTimeout(() => announce(t('startsReply', { name: nameOf(data.agent) })), LONG_MS));
  } else if (kind === 'draft.ended') {
    clearTimeout(started.get(data.draftId));
    started.delete(data.draftId);
  } else if ((kind === 'message.created' || kind === 'delayed.delivered') && data.message?.to === PERSON) announceMessage(data.message);
}

function announceMessage(message) {
  const agent = threadOf(message);
  const name = message.from === SYSTEM ? t('system') : nameOf(agent);
  if (addressed() === agent) {
    const options = optionsOf(message);
    const text = plainText(message).slice(0, LONGEST);
    announce(t('said', { name, text }) + (options ? ` ${t('qrArrived', { n: options.length })}` : ''));
  } else if (performance.now() - othersAt >= OTHERS_MS) {
    othersAt = performance.now();
    announce(t('hasNews', { name }));
  }
}

// Notices above the composer: information disappears by itself, an error stays until it is closed

/** `kind`: info or error. `retry` adds a button, with the text `label`. Returns a function that closes the notice. */
export function toast({ kind = 'info', text, retry = null, label = t('retry') }) {
  const root = region('toasts');
  const el = h('div', { class: `toast toast-${kind}`, 'data-testid': 'toast', data: { kind } }, h('span', { class: 'toast-text', dir: 'auto' }, text));
  let left = INFO_MS;
  let since = 0;
  let timer = null;

  const close = () => {
    clearTimeout(timer);
    if (el.contains(document.activeElement)) toComposer();
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
  if (retry) el.append(button({ class: 'text-btn', 'data-testid': 'toast-retry', onclick: () => {
    close();
    retry();
  } }, label));
  el.append(iconButton('close', t('close'), { 'data-testid': 'toast-close', onclick: close }));
  if (kind === 'error') put(alerts, text);
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

/** Copies a text; by a selection where the clipboard API is missing. */
export async function copyText(text) {
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

/** A script could not be loaded: offers to reload the page. Typed text is kept. */
export const missed = () => void toast({ kind: 'error', text: t('scriptMissed'), retry: () => location.reload() });

addEventListener('unhandledrejection', ({ reason }) => /import|module/i.test(reason?.message) && missed());

/** Shows an error of an action. */
export const oops = (error, retry) => toast({ kind: 'error', text: t('actionFailed', { detail: reasonOf(error) ?? String(error) }), retry });
