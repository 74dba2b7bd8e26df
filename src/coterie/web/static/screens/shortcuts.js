// The list of keyboard shortcuts.

import { flag, h } from '../dom.js';
import { keyNames, t } from '../i18n.js';
import { openDialog, toggle } from './parts.js';

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
  ['keysNavigation', [
    ['Ctrl+K', 'keyPalette'],
    ['Ctrl+F', 'keyFind'],
    ['Alt+↑ / Alt+↓', 'keyAgents'],
    ['Alt+Shift+↑ / ↓', 'keyUnread'],
    ['Alt+I', 'keyInbox'],
    ['Alt+T', 'keyTasks'],
    ['F6 / Shift+F6', 'keyRegions'],
    ['? / Ctrl+/', 'keySheet'],
  ]],
  ['keysThread', [
    ['↑ ↓ Home End', 'keyMove'],
    ['Enter', 'keyInto'],
  ]],
];

export function openShortcuts() {
  const content = h(
    'div',
    { class: 'keys' },
    KEYS.map((/** @type {any[]} */ [title, rows]) =>
      h('section', {}, h('h3', { text: t(title) }), h('dl', {}, rows.map(([keys, what]) => h('div', {}, h('dt', {}, h('kbd', { text: keyNames(keys) })), h('dd', { text: t(what) }))))),
    ),
    // Single-key shortcuts can disturb people who use speech input.
    toggle(t('singleKeysOn'), !flag('noSingleKeys'), (wanted) => flag('noSingleKeys', !wanted)),
  );
  return openDialog(t('shortcuts'), content);
}
