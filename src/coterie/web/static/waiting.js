// The strip above the composer: interjections that the agent has not taken yet.

import { button, fill, h, toComposer } from './dom.js';
import { del } from './api.js';
import { t } from './i18n.js';
import { oops, toast } from './notices.js';
import { on, PERSON, plainText, state, touch } from './state.js';

/** Ids of messages that were shown here; once taken, the thread marks them as interjections. */
export const waited = new Set();
const withdrawing = new Set();

function atWork(agent) {
  const { state: now, phase } = state.agents.get(agent) ?? {};
  return (now === 'active' && phase !== 'starting') || now === 'paused' || now === 'blocked';
}

/** True if a local message waits in the queue, or will when it is sent. */
export const isQueued = ({ status, to }) => status === 'queued' || (status === 'sending' && atWork(to));

/** The person's messages that wait for a working agent; stored ones first. */
export function waitingFor(agent) {
  const stored = (state.queues.get(agent) ?? []).map((id) => state.messages.get(id));
  const mine = stored.filter((each) => each && each.from === PERSON && each.state === 'pending' && (atWork(agent) || waited.has(each.id)));
  for (const each of mine) waited.add(each.id);
  const locals = [...state.locals.values()].filter((each) => each.to === agent && isQueued(each) && !state.messages.has(each.messageId));
  return [...mine, ...locals.map((each) => ({ ...each, id: each.messageId }))];
}

export const isWaiting = (message, agent) => message.state === 'pending' && waitingFor(agent).some((each) => each.id === message.id);

/** Shows why a withdrawal failed: the message was taken already, or another error. */
export function tooLate(error, words, retry) {
  if (error.code === 'already_taken') toast({ text: t(words) });
  else oops(error, retry);
}

export async function withdraw(agent, message) {
  if (!message.id || withdrawing.has(message.id)) return false;
  withdrawing.add(message.id);
  touch(`queue:${agent}`);
  try {
    await del(`/messages/${encodeURIComponent(message.id)}`);
    const queue = state.queues.get(agent);
    if (queue) state.queues.set(agent, queue.filter((id) => id !== message.id));
    const known = state.messages.get(message.id);
    if (known) known.state = 'withdrawn';
    return true;
  } catch (error) {
    tooLate(error, 'tooLate', () => withdraw(agent, message));
    return false;
  } finally {
    withdrawing.delete(message.id);
    touch(`queue:${agent}`, `thread:${agent}`);
  }
}

export function mountStrip(root, agent) {
  let open = false;

  function paint() {
    const items = waitingFor(agent);
    root.hidden = items.length === 0;
    const focused = root.contains(document.activeElement);
    const head = button({ class: 'strip-head', 'aria-expanded': String(open), onclick: () => {
      open = !open;
      paint();
    } }, t('interjectionsWait', { n: items.length }), h('span', { 'aria-hidden': 'true' }, open ? ' ▴' : ' ▾'));
    const list = h('ol', { class: `strip-list ${open ? 'is-open' : ''}` }, items.map((one, index) => row(one, index, items.length)));
    fill(root, items.length > 1 && head, list);
    root.classList.toggle('strip-many', items.length > 1);
    if (focused && !items.length) toComposer();
  }

  const row = (one, index, all) =>
    h('li', { class: 'strip-row', 'data-testid': 'waiting', data: { messageId: one.id ?? '' } },
      h('span', { class: 'strip-tag' }, t('interjection', { n: index + 1, m: all })),
      h('span', { class: 'strip-text', dir: 'auto' }, plainText(one) || t('attachments')),
      button({ class: 'text-btn', 'data-testid': 'withdraw', data: { of: one.id ?? '' }, 'aria-disabled': !one.id || withdrawing.has(one.id) ? 'true' : null, onclick: () => withdraw(agent, one) },
        t(one.unsure ? 'unsure' : !one.id ? 'sending' : withdrawing.has(one.id) ? 'withdrawing' : 'withdraw')));

  paint();
  return on([`queue:${agent}`, `agent:${agent}`], paint);
}
