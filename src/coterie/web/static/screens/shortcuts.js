// Which keys do what.

import { h, fill } from '../dom.js';
import { t } from '../i18n.js';
import { openDialog, toggle } from './parts.js';

/** Keys without Ctrl or Alt can be in the way of those who speak to their computer. */
const SINGLE_KEYS = 'coterie.noSingleKeys';

const mod = /mac/i.test(navigator.platform) ? '⌘' : 'Ctrl';
const KEYS = [
  ['keysConversation', [
    ['Enter', 'keySend'],
    ['Shift+Enter', 'keyLine'],
    ['↑', 'keyEditLast'],
    ['Alt+Q', 'keyQuick'],
    ['1 … 9 0', 'keyPick'],
    ['Alt+.', 'keyStop'],
    ['Esc', 'keyEsc'],
  ]],
  ['keysPlaces', [
    [`${mod}+K`, 'keyPalette'],
    [`${mod}+F`, 'keyFind'],
    ['Alt+↑ / Alt+↓', 'keyAgents'],
    ['Alt+Shift+↑ / ↓', 'keyUnread'],
    ['Alt+I', 'keyInbox'],
    ['F6 / Shift+F6', 'keyRegions'],
    [`? / ${mod}+/`, 'keySheet'],
  ]],
  ['keysThread', [
    ['↑ ↓ Home End', 'keyMove'],
    ['Enter', 'keyInto'],
  ]],
];

export function openShortcuts() {
  const content = h('div', { class: 'keys' });
  fill(
    content,
    KEYS.map(([title, rows]) =>
      h('section', {}, h('h3', { text: t(title) }), h('dl', {}, rows.map(([keys, what]) => h('div', {}, h('dt', {}, h('kbd', { text: keys })), h('dd', { text: t(what) }))))),
    ),
    toggle(t('singleKeysOn'), localStorage.getItem(SINGLE_KEYS) !== '1', (wanted) => localStorage.setItem(SINGLE_KEYS, wanted ? '0' : '1')),
  );
  return openDialog(t('shortcuts'), content);
}
