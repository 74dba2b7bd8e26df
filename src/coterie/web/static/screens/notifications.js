// A word from the browser when somebody writes and nobody looks at the page.

import { t } from '../i18n.js';
import { who } from '../message.js';
import { agentPath, go } from '../router.js';
import { PERSON, plainText, threadOf, watchers } from '../state.js';
import './words.js';

const WANTED = 'coterie.notify';
const LENGTH = 140;

export const allowed = () => 'Notification' in globalThis && Notification.permission === 'granted';
export const wanted = () => localStorage.getItem(WANTED) === '1';

/** Browsers ask only when a person has just pressed something. */
export async function ask(on) {
  localStorage.setItem(WANTED, on ? '1' : '0');
  if (!on || !('Notification' in globalThis)) return false;
  start();
  return (await Notification.requestPermission()) === 'granted';
}

export const start = () => watchers.add(heard);

function heard(kind, { message }) {
  if (kind !== 'message.created' || message?.to !== PERSON) return;
  if (!document.hidden || !wanted() || !allowed()) return;
  // The same tag in every tab: the browser shows one.
  const note = new Notification(who(message.from), { body: plainText(message).slice(0, LENGTH) || t('noText'), tag: message.id });
  note.onclick = () => {
    window.focus();
    go(agentPath(threadOf(message)));
    note.close();
  };
}
