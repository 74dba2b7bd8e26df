// Applies the server's events to the state.

import { early, join, keep, loadPlans, now, openQuestions, part, PERSON, queue, setOpen, settle, state, thread, threadOf, touch, watchers, withNews } from './state.js';

const HANDLERS = {
  'message.created': created,
  'message.updated': updated,
  'quick_replies.changed': answered,
  'queue.changed': queued,
  'agent.upsert': upserted,
  'agent.state': upserted,
  'agent.removed': removed,
  'tool.started': (data) => toolChanged(data, false),
  'tool.ended': (data) => toolChanged(data, true),
  'tool.progress': progressed,
  'delayed.scheduled': delayed,
  'delayed.moved': delayed,
  'delayed.delivered': delayed,
  'delayed.withdrawn': delayed,
  'schedule.changed': scheduled,
  'artifact.created': () => touch('artifacts'),
  read,
  'thread.cleared': cleared,
  'society.state': ({ paused }) => {
    state.allPaused = paused;
    touch('society');
  },
  'configuration.state': ({ applied, problems }) => {
    state.configuration = { applied, problems };
    touch('society');
  },
  unread,
  'task.changed': tasked,
  'draft.started': drafted,
  'draft.delta': drafted,
  'draft.snapshot': drafted,
  'draft.ended': draftEnded,
  'draft.list': draftsListed,
};

const known = (agent) => state.threads.get(agent)?.loaded;
/** Requests the full text of a reply in progress. Set by stream.js. */
export const asks = { draft: (_id) => {} };

export function apply(kind, data) {
  HANDLERS[kind]?.(data);
  for (const watch of watchers) watch(kind, data);
}

function created(data) {
  if (data.gone) return;
  const message = keep(data.message);
  settle(message);
  if (data.draftId) endDraft(data.draftId);
  if (message.to === PERSON) dropUnfinished(message.from);
  join(message);
  setOpen(message);
  if (message.to !== PERSON && message.state === 'pending' && !queue(message.to).includes(message.id)) {
    queue(message.to).push(message.id);
    touch(`queue:${message.to}`);
  }
  if (message.to === PERSON && message.state === 'pending') {
    const one = thread(threadOf(message));
    one.unread += 1;
    one.firstUnread ??= message.id;
    touch('unread', `agent:${threadOf(message)}`);
  }
  if (message.payload?.approval && known(message.from)) loadPlans(message.from); // no other event says that its call waits for approval
  touch(`message:${message.id}`);
}

function updated(data) {
  if (data.gone) {
    const gone = state.messages.get(data.id);
    if (gone) part(gone);
    return;
  }
  const message = keep(data.message);
  settle(message);
  if (message.state === 'withdrawn') part(message);
  else join(message);
  setOpen(message);
  touch(`message:${message.id}`);
}

function answered({ messageId, answer }) {
  state.sending.delete(messageId);
  const message = state.messages.get(messageId);
  if (!message) return;
  if (answer) message.answer = answer;
  else delete message.answer;
  setOpen(message);
  if (message.payload?.approval && known(message.from)) loadPlans(message.from);
  touch(`message:${messageId}`, `agent:${message.from}`, 'questions');
}

function queued({ agent, items, taken, takenAt, withdrawnCalls }) {
  for (const item of items) settle(keep(item));
  state.queues.set(agent, items.map((item) => item.id));
  const mine = taken.filter((id) => state.messages.has(id));
  for (const id of mine) {
    const message = state.messages.get(id);
    Object.assign(message, { state: 'taken', takenAt: takenAt ?? message.takenAt });
    settle(message);
    touch(`message:${id}`);
  }
  const ours = mine.filter((id) => state.messages.get(id).from === PERSON);
  if (ours.length) state.breaks.set(ours[0], { withdrawn: withdrawnCalls });
  const one = state.agents.get(agent);
  if (one) one.waiting = items.length;
  if (withdrawnCalls && known(agent)) loadPlans(agent);
  touch(`queue:${agent}`, `thread:${agent}`, `agent:${agent}`);
}

function upserted(data) {
  if (data.gone) return removed(data);
  const before = state.agents.get(data.id);
  if (!before && !('name' in data)) return early.set(data.id, data);
  const after = withNews(before, data);
  state.agents.set(data.id, after);
  touch(`agent:${data.id}`);
  if (!before || ['parent', 'name', 'retired', 'colour', 'initials', 'role'].some((key) => before[key] !== after[key])) touch('agents');
  if (before && (before.state === 'terminated') !== (after.state === 'terminated')) touch('agents', 'questions');
}

function removed({ id }) {
  const one = state.agents.get(id);
  if (one) Object.assign(one, { state: 'terminated' });
  touch('agents', `agent:${id}`, 'questions', `thread:${id}`);
}

// Tool calls

function toolChanged({ agent, callId }, ended) {
  // The first progress of a call may arrive before its start, which is read from the log.
  if (ended || state.progress.get(agent)?.callId !== callId) state.progress.delete(agent);
  if (known(agent)) loadPlans(agent);
}

function progressed(data) {
  state.progress.set(data.agent, data);
  touch(`progress:${data.agent}`);
}

function delayed(data) {
  if (data.gone) {
    state.delayed.delete(data.id);
    return touch('delayed');
  }
  const message = keep(data.message);
  settle(message);
  if (message.state === 'delayed') state.delayed.set(message.id, message);
  else {
    state.delayed.delete(message.id);
    if (message.state === 'pending' || message.state === 'taken') created(data);
  }
  touch('delayed', `message:${message.id}`);
}

/** Keeps paused schedules only: an active one is seen by its next message. */
function scheduled(data) {
  if (data.state === 'paused') state.paused.set(data.id, data);
  else state.paused.delete(data.id);
  touch('delayed');
}

/** Messages from `from` on are unread again. */
function unread({ thread: id, from, count }) {
  const one = thread(id);
  const at = one.ids.indexOf(from);
  for (const each of at < 0 ? [] : one.ids.slice(at)) {
    const message = state.messages.get(each);
    if (message.to === PERSON && message.state === 'taken') message.state = 'pending';
  }
  Object.assign(one, { unread: one.unread + count, firstUnread: from });
  touch('unread', `agent:${id}`);
}

function read({ thread: id, upto }) {
  const one = thread(id);
  const at = one.ids.indexOf(upto);
  if (one.last?.id === upto || at < 0) one.unread = 0;
  else {
    const left = one.ids.slice(at + 1).map((each) => state.messages.get(each));
    one.unread = left.filter((each) => each.to === PERSON && each.state === 'pending').length;
  }
  for (const each of at < 0 ? [] : one.ids.slice(0, at + 1)) {
    const message = state.messages.get(each);
    if (message.to === PERSON && message.state === 'pending') message.state = 'taken';
  }
  if (!one.unread) one.firstUnread = null;
  touch('unread', `agent:${id}`);
}

function cleared({ thread: id }) {
  const one = thread(id);
  Object.assign(one, { ids: [], older: null, morePlans: false, last: null, unread: 0, firstUnread: null });
  state.plans.delete(id);
  dropUnfinished(id);
  for (const question of openQuestions(id)) state.questions.delete(question.id);
  touch(`thread:${id}`, 'threads', 'unread', 'questions', `agent:${id}`, `plans:${id}`);
}

function tasked(task) {
  if (!task.state) return; // pruned
  state.tasks.set(task.id, task);
  touch('tasks', `task:${task.id}`);
}

// Replies in progress

function drafted(data) {
  let draft = state.drafts.get(data.draftId);
  if (!draft || draft.stopped) { // a turn that is resumed writes a stopped reply again, with the same id
    dropUnfinished(data.agent);
    draft = { id: data.draftId, agent: data.agent, text: '', points: 0, at: now() };
    state.drafts.set(draft.id, draft);
    touch(`drafts:${data.agent}`);
  }
  const silent = !draft.text;
  if (data.text !== undefined) Object.assign(draft, { text: data.text, points: points(data.text) });
  else if (data.delta !== undefined) {
    if (data.from !== draft.points) return asks.draft(draft.id);
    draft.text += data.delta;
    draft.points += points(data.delta);
  }
  touch(`draft:${draft.id}`);
  if (silent && draft.text) touch(`drafts:${draft.agent}`); // the reply appears in the thread with its first text
}

/** Number of code points; the server's offsets count these, not UTF-16 units. */
const points = (text) => text.length - (text.match(/[\ud800-\udbff][\udc00-\udfff]/g)?.length ?? 0);

function draftEnded({ draftId, outcome, messages = [] }) {
  const draft = state.drafts.get(draftId);
  if (!draft) return;
  if (outcome === 'withdrawn' && known(draft.agent)) loadPlans(draft.agent); // they have the text
  const isPlan = outcome === 'stored' && !messages.length && draft.text.trim() && known(draft.agent);
  if (isPlan) {
    // It was said before a tool call. It stays until the plan that has the text is loaded.
    Object.assign(draft, { ended: true, plannedAt: performance.now() });
    loadPlans(draft.agent);
  } else if (outcome !== 'stored' && outcome !== 'withdrawn' && !messages.length && draft.text) {
    Object.assign(draft, { stopped: true, outcome });
    touch(`draft:${draftId}`);
  } else if (!messages.length || messages.every((id) => state.messages.has(id))) endDraft(draftId);
  else draft.ended = true; // stays until its message arrives
  touch(`drafts:${draft.agent}`);
}

/** After a reconnect: the ends of all other replies were missed. */
function draftsListed({ draftIds }) {
  for (const { id, agent, stopped } of [...state.drafts.values()]) if (!stopped && !draftIds.includes(id)) apply('draft.ended', { draftId: id, agent, outcome: 'stored' });
}

function endDraft(draftId) {
  const draft = state.drafts.get(draftId);
  if (!draft) return;
  state.drafts.delete(draftId);
  touch(`drafts:${draft.agent}`);
}

/** What a failed or interrupted request had said stays until the next answer begins. */
function dropUnfinished(agent) {
  for (const draft of [...state.drafts.values()]) if (draft.agent === agent && draft.stopped && draft.outcome !== 'stopped') endDraft(draft.id);
}

export function dropDrafts() {
  state.progress.clear();
  for (const draft of [...state.drafts.values()]) if (!draft.stopped) endDraft(draft.id);
}
