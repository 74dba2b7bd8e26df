// One line under the person's last message of a task: what is being done for it, or how it ended. Also what other screens
// say about tasks.

import { get, post, query } from './api.js';
import { button, h, setAttr, setText } from './dom.js';
import { duration, many, money, t } from './i18n.js';
import { oops, toast } from './notices.js';
import { isOpenTask, nameOf, on, state, touch } from './state.js';

const SOON_MS = 300; // the event of a new task arrives earlier
const PAGE = 100;
const ENDED = { done: 'taskDoneIn', failed: 'taskFailedAfter', stopped: 'taskStoppedAfter' };

export const taskPath = (id) => `#/tasks/${encodeURIComponent(id)}`;

/** Null if no request has a price. Requests without a price make the sum a lower bound. */
export function costWords({ cost, currency, unpricedRequests }) {
  if (cost === null || cost === undefined) return null;
  return unpricedRequests > 0 ? t('atLeast', { cost: money(cost, currency) }) : money(cost, currency);
}

const isQueued = ({ id }) => [...state.queues.values()].flat().some((one) => state.messages.get(one)?.task === id);

/** True if the task has only scheduled messages left. Those that are delayed by a minute or more have a task of their own. */
const waitsForTime = (task) => !isQueued(task) && [...state.delayed.values()].some((one) => one.task === task.id);

/** A task in a few words, without its cost if that is unknown. `since`: when the person wrote; otherwise its beginning. */
export function taskWords(task, since = task.createdAt) {
  const { state: now, active, activeAgents, agents, messages } = task;
  const lasted = duration(Math.max(100, Date.parse(task.stoppedAt ?? task.lastAt) - Date.parse(since)));
  const live = now === 'waiting' ? t('taskState_waiting') : active > 1 ? t('agentsAtWork', { n: active }) : active === 1 ? t('agentAtWork', { name: nameOf(activeAgents[0]) }) : t(waitsForTime(task) ? 'taskScheduled' : 'taskQueued');
  const words = isOpenTask(task) ? [live, many('messages', messages)] : [now !== 'stopped' && task.unread ? t('taskUnread') : t(ENDED[now], { time: lasted }), agents > 1 && many('agents', agents)];
  return [...words, costWords(task)].filter(Boolean).join(' · ');
}

/** Stops everything of a task, after a confirmation. */
async function stopTask({ id, text }) {
  const { confirm } = await import('./screens/parts.js');
  const opener = document.activeElement;
  const sure = await confirm(t('taskStopSure', { text: (state.tasks.get(id)?.text ?? text) || t('noText') }), t('stop'));
  // The dialog does not return the focus to a button that was moved meanwhile.
  if (document.activeElement === document.body) opener?.focus();
  if (!sure) return;
  const stop = async () => {
    try {
      const { turns, messages, questions } = await post(`/tasks/${encodeURIComponent(id)}/stop`);
      toast({ text: turns + messages + questions ? t('taskStopped', { turns, messages, questions }) : t('taskStoppedNothing') });
    } catch (error) {
      oops(error, stop);
    }
  };
  await stop();
}

/** Grants a task that has used its budget one more. */
export async function continueTask(task) {
  try {
    const after = await post(`/tasks/${encodeURIComponent(task.id)}/continue`);
    state.tasks.set(task.id, after);
    touch('tasks', `task:${task.id}`);
  } catch (error) {
    oops(error, () => continueTask(task));
  }
}

export const stopButton = (task, props = {}) => button({ class: 'text-btn danger', 'data-testid': 'task-stop', 'aria-label': t('taskStopThis', { text: task.text || t('noText') }), onclick: () => stopTask(task), ...props }, t('stop'));

/** Puts the line of a message's task after the element `before`. */
export function taskLine(message, before) {
  const link = h('a', { href: taskPath(message.task), 'data-testid': 'task-link', title: t('taskOpen') });
  const stop = stopButton({ id: message.task, text: String(message.payload?.text ?? '').slice(0, 200) });
  const el = h('span', { class: 'task-line meta', 'data-testid': 'task-line', hidden: true }, link, stop);
  const update = () => {
    const task = state.tasks.get(message.task);
    if (!task) return want(message); // after a reconnection the last words stay until it is loaded
    el.hidden = false;
    const isLost = !isOpenTask(task) && state.messages.get(message.id)?.state === 'dead';
    setText(link, isLost ? t('taskUndelivered') : taskWords(task, message.createdAt));
    setAttr(el, 'data-state', isLost ? 'failed' : task.state);
    if (!isOpenTask(task) && document.activeElement === stop) link.focus(); // a hidden element loses the focus to the page
    stop.hidden = !isOpenTask(task);
  };
  update();
  before.after(el);
  const end = on([`task:${message.task}`, `message:${message.id}`, 'snapshot', 'agents', 'delayed'], update);
  return {
    leave() {
      end();
      if (el.contains(document.activeElement)) el.closest('article')?.focus();
      el.remove();
    },
  };
}

// Tasks that ended before the page was opened, loaded from new to old as far as messages are shown

let pages = new Map(); // agent -> {next, reached, target, busy}
let older = new Set(); // tasks that were looked for by their id
on('snapshot', () => {
  pages = new Map();
  older = new Set();
});

function want(message) {
  if (message.task === message.id) return wantPage(message);
  // An answer to a question of a task, which may have begun long before.
  if (older.has(message.task)) return;
  older.add(message.task);
  setTimeout(async () => {
    if (state.tasks.has(message.task)) return;
    const { nodes, ...task } = await get(`/tasks/${encodeURIComponent(message.task)}`).catch(() => ({}));
    if (task.id && !state.tasks.has(task.id)) put(task);
  }, SOON_MS);
}

const put = (task) => {
  state.tasks.set(task.id, task);
  touch(`task:${task.id}`);
};

function wantPage({ to, createdAt }) {
  if (!pages.has(to)) pages.set(to, { reached: '9', target: '9' });
  const one = pages.get(to);
  if (one.next === null || one.reached < createdAt) return; // it was looked for already
  if (createdAt < one.target) one.target = createdAt;
  if (one.busy) return;
  one.busy = true;
  setTimeout(() => load(to, one).catch(() => {}).finally(() => {
    one.busy = false;
  }), SOON_MS);
}

async function load(agent, one) {
  while (one.next !== null && one.reached >= one.target) {
    const page = await query('/tasks', { agent, limit: PAGE, cursor: one.next });
    one.next = page.next;
    one.reached = page.items.at(-1)?.createdAt ?? '';
    for (const task of page.items) if (!state.tasks.has(task.id)) put(task); // an event may have brought a newer one
  }
}
