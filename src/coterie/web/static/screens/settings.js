// What is a matter of taste, kept in this browser.

import { ctrlEnterSends, setCtrlEnterSends } from '../composer.js';
import { h } from '../dom.js';
import { t } from '../i18n.js';
import { allowed, ask, wanted } from './notifications.js';
import { SINGLE_KEYS, singleKeys } from './shortcuts.js';
import { toggle } from './parts.js';

export function settings() {
  const told = h('p', { class: 'meta', role: 'status' });
  const notify = toggle(t('notifyOn'), wanted() && allowed(), async (on) => {
    const may = await ask(on);
    told.textContent = on && !may ? t('notifyRefused') : '';
    notify.querySelector('input').checked = on && may;
  });
  return h(
    'section',
    { class: 'settings', 'aria-labelledby': 'setup-taste' },
    h('h2', { id: 'setup-taste', text: t('settings') }),
    toggle(t('ctrlEnterSends'), ctrlEnterSends(), setCtrlEnterSends),
    toggle(t('singleKeysOn'), singleKeys(), (on) => localStorage.setItem(SINGLE_KEYS, on ? '0' : '1')),
    notify,
    told,
  );
}
