// The command palette: finds agents, actions and messages.

import { query } from '../api.js';
import { fill, h, reveal } from '../dom.js';
import { dayAndTime, t } from '../i18n.js';
import { who } from '../message.js';
import { agentPath, go } from '../router.js';
import { PERSON, called, keep, plainText, state, threadOf } from '../state.js';
import { openDialog } from './parts.js';

const SCREENS = ['inbox', 'tasks', 'timeline', 'org', 'delayed', 'artifacts', 'agents', 'dead', 'setup'];
const PAUSE_MS = 150;
const SHOWN = 8;

/**
 * `actions`: further actions, `{label, run}`.
 * `find`: text typed while this script was loading; `entered`: true if Enter was pressed.
 */
export function openPalette({ actions, find, entered }) {
  const input = h('input', { type: 'text', class: 'palette-input', role: 'combobox', 'aria-expanded': 'true', 'aria-controls': 'palette-list', 'aria-autocomplete': 'list', 'aria-label': t('paletteWhat'), placeholder: t('paletteWhat'), autocomplete: 'off', spellcheck: 'false' });
  const list = h('div', { id: 'palette-list', class: 'palette-list', role: 'listbox', 'aria-label': t('search') });
  const status = h('p', { class: 'meta', role: 'status' });
  let found = [];
  let at = 0;
  let messages = [];
  let turn = 0;
  let timer = null;

  const choose = (item) => {
    close();
    item.run();
  };
  const draw = () => {
    const words = input.value.trim().toLowerCase();
    const has = (text) => words.split(/\s+/).every((word) => text.toLowerCase().includes(word));
    const agents = [...state.agents.values()].filter((one) => one.kind !== 'person' && has(called(one))).slice(0, SHOWN);
    const deeds = [...SCREENS.map((name) => ({ label: t(name), run: () => go(`#/${name}`) })), ...actions].filter((one) => has(one.label));
    const groups = [
      ['paletteAgents', agents.map((one) => ({ label: one.name, hint: t(one.state), run: () => go(agentPath(one.id)) }))],
      ['paletteActions', deeds.slice(0, SHOWN)],
      ['paletteMessages', messages],
    ].filter(([, items]) => items.length);
    found = groups.flatMap(([, items]) => items);
    at = Math.min(at, Math.max(0, found.length - 1));
    let n = 0;
    fill(list, groups.map((/** @type {any[]} */ [title, items]) => h('div', { role: 'group', 'aria-label': t(title) }, h('p', { class: 'palette-head', 'aria-hidden': 'true', text: t(title) }), items.map((item) => option(item, n++)))));
    status.textContent = found.length || !words ? '' : t('searchNone');
    mark();
  };
  const option = (item, n) =>
    h('div', { role: 'option', id: `palette-${n}`, class: 'palette-option', onclick: () => choose(item) }, h('span', { dir: 'auto', text: item.label }), item.hint && h('span', { class: 'meta', text: item.hint }));
  const mark = () => {
    for (const one of list.querySelectorAll('[role=option]')) one.setAttribute('aria-selected', String(one.id === `palette-${at}`));
    const current = list.querySelector(`#palette-${at}`);
    if (!current) return input.removeAttribute('aria-activedescendant');
    input.setAttribute('aria-activedescendant', current.id);
    reveal(current, list);
  };
  const search = async () => {
    const words = input.value.trim();
    const mine = (turn += 1);
    if (words.length < 2) messages = [];
    else {
      const page = await query('/search', { q: words, limit: SHOWN }).catch(() => ({ items: [] }));
      if (mine !== turn) return;
      messages = page.items.map(asItem);
    }
    draw();
  };
  input.addEventListener('input', () => {
    at = 0;
    draw();
    clearTimeout(timer);
    timer = setTimeout(search, PAUSE_MS);
  });
  input.addEventListener('keydown', (event) => {
    if (event.isComposing || event.keyCode === 229) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) at = (at + step + found.length) % found.length;
    else if (event.key === 'Enter' && found[at]) choose(found[at]);
    else if (event.key === 'k' && (event.ctrlKey || event.metaKey)) close();
    else return;
    event.preventDefault();
    mark();
  });
  const { close } = openDialog(t('palette'), h('div', { class: 'palette' }, input, list, status), {
    closed: () => {
      clearTimeout(timer);
      turn += 1;
    },
  });
  input.value = find;
  draw();
  if (find) search();
  input.focus();
  if (entered && found.length) choose(found[0]);
}

function asItem(message) {
  keep(message);
  const agent = threadOf(message);
  const to = message.to === PERSON ? '' : ` → ${who(message.to)}`;
  return {
    label: plainText(message).slice(0, 120) || t('noText'),
    hint: `${who(message.from)}${to} · ${dayAndTime(message.createdAt)}`,
    run: () => go(agent ? agentPath(agent, message.id) : `#/timeline?agent=${encodeURIComponent(message.from)}`),
  };
}
