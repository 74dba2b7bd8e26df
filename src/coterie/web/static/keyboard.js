// Keyboard shortcuts. Punctuation is matched by key position, so that other layouts work.

import { flag, h } from './dom.js';
import { onMac, t } from './i18n.js';
import { agentPath, go, route, show } from './router.js';
import { missed } from './notices.js';
import { addressed, isOpen, openQuestions, state } from './state.js';
import { closeSlides, nextTheme, region, switchLanguage } from './shell.js';
import { stop } from './agents_list.js';
import { focusNewest } from './quick_replies.js';
import { openAgent, openComposer, showMessage } from './thread.js';

export function start() {
  addEventListener('keydown', pressed);
}

/** Loads a script for what is typed next. While it loads, a temporary input collects the keys. */
async function typeInto(label, load, open) {
  if (document.querySelector('.early-find')) return;
  const had = document.activeElement;
  const early = h('input', { class: 'early-find', 'aria-label': label, onkeydown: ({ key, isComposing }) => {
    if (key === 'Escape') had.focus();
    entered ||= key === 'Enter' && !isComposing;
  } });
  let entered = false;
  document.body.append(early);
  early.focus();
  const there = await load().catch(missed);
  const wanted = document.activeElement === early;
  if (wanted) had.focus(); // the focus is restored to the element that has it now
  early.remove();
  if (wanted && there) open(there, early.value, entered);
}

export const openPalette = () => typeInto(t('paletteWhat'), () => import('./screens/palette.js'), (palette, find, entered) => palette.openPalette({ find, entered, actions: [
  { label: t('theme'), run: nextTheme },
  { label: t('languageLabel'), run: switchLanguage },
  { label: t('shortcuts'), run: showSheet },
  { label: t('stop'), run: () => stop(openAgent()) },
  { label: t('agentsNew'), run: () => go('#/agents/new') },
  { label: t(state.allPaused ? 'resumeAll' : 'pauseAll'), run: () => import('./screens/conversation_menu.js').then((menu) => menu.pauseAll()) },
  { label: t('stopAll'), run: () => import('./screens/conversation_menu.js').then((menu) => menu.stopAll()) },
] }));

export const showSheet = () => import('./screens/shortcuts.js').then((sheet) => sheet.openShortcuts());

const typing = (el) => el.matches?.('input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]');

function pressed(event) {
  if (event.defaultPrevented || event.isComposing || document.querySelector('dialog[open]')) return;
  if (handle(event)) event.preventDefault();
}

function handle(event) {
  const { key, code, altKey, shiftKey } = event;
  const mod = event.ctrlKey || event.metaKey;
  // On a Mac, Ctrl shortcuts edit text.
  const ours = onMac ? event.metaKey : event.ctrlKey;
  const letter = ours && !altKey && !shiftKey && key.toLowerCase();
  if (letter === 'k') return yes(openPalette());
  if (letter === 'f') return find();
  if (ours && code === 'Slash') return yes(showSheet());
  if (key === 'F6') return cycle(shiftKey ? -1 : 1);
  if (altKey && !mod) return alt(event);
  if (key === 'Escape') return escape(event);
  if (mod || typing(event.target)) return false;
  if (key === '?' && !flag('noSingleKeys')) return yes(showSheet());
  if (key.length === 1 && key !== ' ') write();
  return false;
}

/** Moves the focus to the composer of the agent in the address, before the browser inserts the typed character. */
function write() {
  if (!['a', ''].includes(route().name)) return;
  if (openAgent() !== addressed()) show(); // the address has changed just now
  openComposer()?.focus();
}

const yes = (_done) => true;

function alt({ key, code, shiftKey }) {
  if (key === 'ArrowUp' || key === 'ArrowDown') return step(key === 'ArrowUp' ? -1 : 1, shiftKey);
  if (code === 'KeyQ') return quick();
  if (code === 'Period') return yes(stop(openAgent()));
  if (code === 'KeyI') return yes(go('#/inbox?only=questions'));
  if (code === 'KeyT') return yes(go('#/tasks'));
  return false;
}

/** Focuses the newest open question of this conversation, else goes to one of another. */
function quick() {
  if (focusNewest((message) => (openAgent() ? showMessage(message) : true))) return true;
  const other = openQuestions().find((one) => isOpen(one));
  if (other) go(agentPath(other.from, other.id));
  return true;
}

function step(by, onlyUnread) {
  // The agent in the address: a second key press may come before the first conversation is shown.
  const here = addressed();
  const rows = [...document.querySelectorAll('.tree [data-agent]')].map((el) => el.dataset.agent);
  const all = onlyUnread ? rows.filter((id) => state.threads.get(id)?.unread || id === here) : rows;
  if (!all.length) return true;
  const at = all.indexOf(here);
  go(agentPath(all[(at + by + all.length) % all.length]));
  return true;
}

let foundAt = -10_000;

/** Opens our search, because most of the thread is not in the document. Pressed again: the browser's search. */
function find() {
  if (route().name !== 'a' || performance.now() - foundAt < 2_000) return false;
  foundAt = performance.now();
  typeInto(t('findHere'), () => import('./screens/find.js'), (bar, words) => bar.openFind(openAgent(), words));
  return true;
}

function cycle(by) {
  const stops = [
    region('side').querySelector('.tree [tabindex="0"]') ?? region('side').querySelector('input'),
    document.querySelector('.thread') ?? region('screen').querySelector('a, button, input, [tabindex="0"]'),
    document.querySelector('.strip:not([hidden]) button:not([hidden])'),
    document.getElementById('composer'),
    region('inspector').querySelector('.inspector-body'),
  ].filter((el) => el && el.offsetParent !== null && !el.closest('[inert]'));
  const at = stops.findIndex((el) => el.parentElement.contains(document.activeElement) || regionOf(el).contains(document.activeElement));
  stops[(at + by + stops.length) % stops.length]?.focus();
  return true;
}

const regionOf = (el) => el.closest('.side, .thread, .strip, .composer, .inspector') ?? el;

function escape(event) {
  if (document.body.dataset.slide) return yes(closeSlides());
  if (event.target?.closest?.('.screen, .toasts')) return yes(openComposer()?.focus());
  return false;
}
