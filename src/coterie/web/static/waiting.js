// The strip above the composer: interjections that the agent has not taken yet.

import { button, fill, h, setAttr, setText, toComposer } from './dom.js';
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
  // Rows stay in the document while they are repainted: a press on a replaced button would not become a click.
  let rows = new Map();
  const head = button({ class: 'strip-head', onclick: () => {
    open = !open;
    paint();
  } });
  const list = h('ol', { class: 'strip-list' });
  root.replaceChildren(head, list);

  function paint() {
    const items = waitingFor(agent);
    const focused = root.contains(document.activeElement);
    root.hidden = items.length === 0;
    root.classList.toggle('strip-many', items.length > 1);
    list.classList.toggle('is-open', open);
    setAttr(head, 'aria-expanded', String(open));
    fill(head, t('interjectionsWait', { n: items.length }), h('span', { 'aria-hidden': 'true' }, open ? ' ▴' : ' ▾')).hidden = items.length < 2;
    rows = new Map(items.map((one, index) => {
      const key = one.id ?? one.clientId;
      const row = rows.get(key) ?? newRow(one);
      row.update(index, items.length);
      return [key, row];
    }));
    const elements = [...rows.values()].map(({ el }) => el);
    const at = [...list.children].findIndex((el) => el.contains(document.activeElement));
    for (const el of [...list.children]) if (!elements.includes(el)) el.remove();
    elements.forEach((el, index) => list.children[index] !== el && list.insertBefore(el, list.children[index] ?? null));
    if (focused && (!items.length || (head.hidden && document.activeElement === head))) toComposer();
    else if (at >= 0 && !list.contains(document.activeElement)) elements[Math.min(at, elements.length - 1)].querySelector('button').focus();
  }

  function newRow(one) {
    const tag = h('span', { class: 'strip-tag' });
    const back = button({ class: 'text-btn', 'data-testid': 'withdraw', data: { of: one.id ?? '' }, onclick: () => withdraw(agent, one) });
    const el = h('li', { class: 'strip-row', 'data-testid': 'waiting', data: { messageId: one.id ?? '' } },
      tag, h('span', { class: 'strip-text', dir: 'auto' }, plainText(one) || t('attachments')), back);
    return { el, update(index, all) {
      setText(tag, t('interjection', { n: index + 1, m: all }));
      setAttr(back, 'aria-disabled', !one.id || withdrawing.has(one.id) ? 'true' : null);
      setText(back, t(!one.id ? state.locals.get(one.clientId)?.unsure ? 'unsure' : 'sending' : withdrawing.has(one.id) ? 'withdrawing' : 'withdraw'));
    } };
  }

  paint();
  return on([`queue:${agent}`, `agent:${agent}`], paint);
}
