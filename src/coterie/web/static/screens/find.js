// Find in the conversation: the server searches, because most of the conversation is not in the document.

import { query } from '../api.js';
import { button, h, icon, iconButton, setText, toComposer } from '../dom.js';
import { t } from '../i18n.js';
import { addressed, keep, loadAround, saidIn, threadOf, unshortened } from '../state.js';
import { region } from '../shell.js';
import { openAgent, showMessage } from '../thread.js';
import { styled } from './parts.js';

await styled('/static/screens/menu.css');

const PAUSE_MS = 150;
const MOST = 200;
let opened = null;

/** Opens the bar above the conversation, or selects its text if it is open. `words`: what was typed already. */
export function openFind(agent, words = '') {
  if (opened?.agent === agent && opened.bar.isConnected) return opened.select();
  opened?.close();
  let hits = []; // newest first, as the server finds them
  let at = -1;
  let turn = 0;
  let timer = null;
  let searching = false;
  const had = document.activeElement;
  const input = h('input', { type: 'search', class: 'field', 'aria-label': t('findHere'), placeholder: t('findHere'), autocomplete: 'off', 'data-testid': 'find' });
  const count = h('span', { class: 'meta num find-count', role: 'status', 'data-testid': 'find-count' });
  const step = (by) => {
    if (!hits.length) return;
    at = (at + by + hits.length) % hits.length;
    show();
  };
  const bar = h('div', { class: 'find-bar', role: 'search' }, input, count,
    button({ class: 'icon-btn find-up', 'aria-label': t('findPrevious'), title: t('findPrevious'), 'data-testid': 'find-previous', onclick: () => step(1) }, icon('up')),
    button({ class: 'icon-btn', 'aria-label': t('findNext'), title: t('findNext'), 'data-testid': 'find-next', onclick: () => step(-1) }, icon('down')),
    iconButton('close', t('close'), { onclick: () => close() }));

  async function search() {
    const words = input.value.trim();
    const mine = (turn += 1);
    let found = [];
    const ask = (path, more) => (words ? query(path, { q: words, agent, limit: MOST, ...more }).catch(() => ({ items: [] })) : { items: [] });
    const add = (items) => {
      const current = found[at]; // stays the current one
      found = [...found, ...items].sort((a, b) => (a.deliveredAt < b.deliveredAt ? 1 : a.deliveredAt > b.deliveredAt ? -1 : 0));
      hits = found;
      at = current ? hits.indexOf(current) : hits.length ? 0 : -1;
      if (current) tell();
      else if (hits.length) show();
    };
    const messages = async () => {
      const { items } = await ask('/search');
      if (mine === turn) add(items.filter((message) => threadOf(message) === agent && message.deliveredAt).map(keep));
    };
    const plans = async () => { // the server searches a part of them for each request
      for (let more = {}, n = 0; more && n < MOST;) {
        const { items, next } = await ask('/runs', more);
        if (mine !== turn) return;
        add(items.map(saidIn));
        n += items.length;
        more = next && { before: next };
      }
    };
    at = -1;
    searching = true;
    await Promise.all([messages(), plans()]);
    if (mine !== turn) return;
    searching = false;
    tell();
  }

  function tell() {
    setText(count, !input.value.trim() ? '' : hits.length ? t('findCount', { n: hits.length - at, m: hits.length }) : searching ? '' : t('searchNone'));
    paint();
  }

  async function show() {
    tell();
    const hit = hits[at];
    if (!hit) return;
    await unshortened(agent, async () => {
      await loadAround(agent, hit.id).catch(() => {});
      if (hits[at] === hit && openAgent() === agent) showMessage(hit);
    });
    paint();
  }

  /** Marks the words in the messages that are in the document. */
  function paint() {
    if (!globalThis.CSS?.highlights) return;
    const words = input.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Set(hits.map((one) => one.id));
    const [all, current] = [[], []];
    for (const el of document.querySelectorAll('.feed article')) {
      const id = el.dataset.messageId ?? el.dataset.said;
      if (found.has(id)) (id === hits[at]?.id ? current : all).push(...rangesIn(el.querySelector('.bubble'), words));
    }
    CSS.highlights.set('find', new Highlight(...all));
    CSS.highlights.set('find-current', new Highlight(...current));
  }

  function close() {
    clearTimeout(timer);
    turn += 1;
    opened = null;
    seen.disconnect();
    document.removeEventListener('screen', left);
    globalThis.CSS?.highlights?.delete('find');
    globalThis.CSS?.highlights?.delete('find-current');
    const focused = bar.contains(document.activeElement);
    bar.remove();
    if (focused) (had?.isConnected && had !== document.body ? had.focus() : toComposer());
  }

  input.addEventListener('input', () => {
    clearTimeout(timer);
    timer = setTimeout(search, PAUSE_MS);
  });
  bar.addEventListener('keydown', (event) => {
    if (event.isComposing) return;
    if (event.key === 'Enter' && event.target === input) step(event.shiftKey ? -1 : 1);
    else if (event.key === 'Escape') close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const left = () => addressed() !== agent && close();
  document.addEventListener('screen', left);
  // Messages are added to the document while the conversation scrolls.
  const seen = new MutationObserver(() => hits.length && paint());
  seen.observe(region('main'), { childList: true, subtree: true });
  region('screen').before(bar);
  opened = { agent, bar, close, select: () => {
    input.focus();
    input.select();
  } };
  input.focus();
  input.value = words;
  if (words) search();
}

/** Ranges of all words in the texts of an element. */
function rangesIn(root, words) {
  const ranges = [];
  const walk = root && document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walk?.nextNode()) {
    const node = /** @type {Text} */ (walk.currentNode);
    const text = node.data.toLowerCase();
    for (const word of words) {
      for (let from = text.indexOf(word); from >= 0; from = text.indexOf(word, from + word.length)) {
        const range = new Range();
        range.setStart(node, from);
        range.setEnd(node, Math.min(node.data.length, from + word.length));
        ranges.push(range);
      }
    }
  }
  return ranges;
}
