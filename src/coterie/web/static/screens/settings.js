// Settings of this browser.

import { flag, h } from '../dom.js';
import { t } from '../i18n.js';
import { who } from '../message.js';
import { agentPath, go } from '../router.js';
import { PERSON, plainText, threadOf, watchers } from '../state.js';
import { isVisibleElsewhere } from '../stream.js';
import { section, toggle } from './parts.js';

export function settings() {
  const status = h('p', { class: 'meta', role: 'status' });
  const notify = toggle(t('notifyOn'), flag('notify') && allowed(), async (on) => {
    const may = await ask(on);
    status.textContent = on && !may ? t('notifyRefused') : '';
    notify.querySelector('input').checked = on && may;
  });
  return section(
    'setup-taste',
    t('settings'),
    toggle(t('ctrlEnterSends'), flag('ctrlEnterSends'), (on) => flag('ctrlEnterSends', on)),
    notify,
    status,
  );
}

// Browser notifications for messages while the page is hidden

const LENGTH = 140;

const allowed = () => 'Notification' in globalThis && Notification.permission === 'granted';

/** Asks for permission; browsers allow that only after a click or key press. */
async function ask(on) {
  flag('notify', on);
  if (!on || !('Notification' in globalThis)) return false;
  start();
  return (await Notification.requestPermission()) === 'granted';
}

export const start = () => watchers.add(heard);

async function heard(kind, { message }) {
  if ((kind !== 'message.created' && kind !== 'delayed.delivered') || message?.to !== PERSON) return;
  if (!document.hidden || !flag('notify') || !allowed() || (await isVisibleElsewhere())) return;
  // All tabs use the same tag, so that the browser shows one notification.
  const path = agentPath(threadOf(message), message.id);
  const content = { body: plainText(message).slice(0, LENGTH) || t('noText'), tag: message.id, icon: '/static/icon-192.png', data: { path: `/${path}` } };
  try {
    const note = new Notification(who(message.from), content);
    note.onclick = () => {
      window.focus();
      go(path);
      note.close();
    };
  } catch {
    // On phones only the service worker may show one; it also handles the click.
    navigator.serviceWorker?.ready.then((worker) => worker.showNotification(who(message.from), content));
  }
}
