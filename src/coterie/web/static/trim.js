// Bounds the messages that a page keeps in memory. What is left out is read again when it is scrolled to.

import { addressed, holders, shorten, state, watchers } from './state.js';
import { followsEnd } from './thread.js';

const MOST = 1_200; // messages; more if open screens show more
const OPEN = 200; // newest messages of the conversation that is shown at its end
const OTHER = 50; // of each other conversation
const MORE = 250; // between two attempts
let limit = MOST;

export function start() {
  watchers.add(check);
  document.addEventListener('screen', check);
}

function check() {
  if (state.messages.size <= limit) return;
  trim();
  limit = Math.max(MOST, state.messages.size + MORE);
}

function trim() {
  const open = addressed();
  for (const id of state.threads.keys()) {
    if (id !== open) shorten(id, OTHER);
    else if (followsEnd(id)) shorten(id, OPEN);
  }
  const shown = neededIds();
  for (const id of shown) {
    const about = state.messages.get(id)?.inReplyTo;
    if (about) shown.add(about);
  }
  for (const id of state.messages.keys()) if (!shown.has(id)) state.messages.delete(id);
}

function neededIds() {
  const ids = new Set([...state.questions, ...state.sending.keys(), ...state.delayed.keys()]);
  const add = (id) => id && ids.add(id);
  for (const { last, ids: thread } of state.threads.values()) [last?.id, ...thread].forEach(add);
  for (const queue of state.queues.values()) queue.forEach(add);
  for (const { inReplyTo } of state.locals.values()) add(inReplyTo);
  for (const holder of holders) holder().forEach(add);
  return ids;
}
