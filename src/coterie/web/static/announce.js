// What a screen reader is told: one line per finished message of the open conversation, and errors. Never tokens.

import { h } from './dom.js';
import { t } from './i18n.js';
import { place } from './router.js';
import { nameOf, optionsOf, PERSON, plainText, state, SYSTEM, threadOf, watchers } from './state.js';

const STAYS_MS = 1_000;
const OTHERS_MS = 5_000;
const LONG_MS = 3_000;
const MOST = 200;

const log = h('div', { role: 'log', class: 'vh', 'aria-live': 'polite', 'data-testid': 'live-log' });
const alerts = h('div', { role: 'alert', class: 'vh', 'data-testid': 'live-alert' });
let othersAt = -OTHERS_MS;
const started = new Map();

export function start() {
  watchers.add(heard);
}
document.body.append(h('div', { class: 'live' }, log, alerts));

export const announce = (text) => put(log, text);
export const alert = (text) => put(alerts, text);

function put(root, text) {
  const line = h('p', {}, text);
  root.append(line);
  setTimeout(() => line.remove(), STAYS_MS);
}

const isOpenHere = (agent) => (place().name === 'a' && place().args[0] === agent) || (place().name === '' && state.home === agent);

function heard(kind, data) {
  if (kind === 'draft.started' && isOpenHere(data.agent)) {
    started.set(data.draftId, setTimeout(() => announce(t('startsReply', { name: nameOf(data.agent) })), LONG_MS));
  } else if (kind === 'draft.ended') {
    clearTimeout(started.get(data.draftId));
    started.delete(data.draftId);
  } else if ((kind === 'message.created' || kind === 'delayed.delivered') && data.message?.to === PERSON) told(data.message);
}

function told(message) {
  const agent = threadOf(message);
  const name = message.from === SYSTEM ? t('system') : nameOf(agent);
  if (isOpenHere(agent)) {
    const options = optionsOf(message);
    const text = strip(plainText(message)).slice(0, MOST);
    announce(t('said', { name, text }) + (options ? ` ${t('qrArrived', { n: options.length })}` : ''));
  } else if (performance.now() - othersAt >= OTHERS_MS) {
    othersAt = performance.now();
    announce(t('hasNews', { name }));
  }
}

/** Markdown's signs say nothing when they are read aloud. */
const strip = (text) => text.replace(/\[([^\]]*)\]\([^)]*\)/g, '$1').replace(/[*_`#>~|]+/g, '').replace(/\s+/g, ' ').trim();
