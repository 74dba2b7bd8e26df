// A cache of the server's state, merged by id. It can be discarded at any time.

import { get, query } from './api.js';
import { count, duration, lang, many, money, t } from './i18n.js';
import { route } from './router.js';

export const PERSON = 'user';
export const SYSTEM = 'system';

export const state = {
  booted: false,
  epoch: '',
  seq: 0,
  skew: 0, // server's clock minus ours, in ms
  agents: new Map(),
  messages: new Map(),
  threads: new Map(), // agent -> {ids, requested, loaded, older, pinned, morePlans, unread, firstUnread, last}
  queues: new Map(), // agent -> ids in FIFO order
  delayed: new Map(), // id -> message
  allPaused: false, // the whole society
  configuration: { applied: true, problems: [] }, // the owner's files as the server last read them
  paused: new Map(), // id -> recurring message that is paused
  questions: new Set(), // ids of open questions to the person
  drafts: new Map(), // draftId -> {id, agent, text, stopped, outcome}
  progress: new Map(), // agent -> {callId, name, progress, total, message} of its running tool call
  plans: new Map(), // agent -> plans, oldest first
  breaks: new Map(), // first message id -> {withdrawn}: interjections that were taken together
  sending: new Map(), // question id -> {option, clientId, unsure}: answer being sent
  locals: new Map(), // clientId -> sent message that the server has not confirmed
  tasks: new Map(), // id -> task; all open ones of the snapshot, and others that were looked up
  moreTasks: 0, // open tasks that the snapshot left out
  connection: 'ok', // ok | reconnecting | offline | restored | stopped
  shutdown: null,
};

// Subscriptions. Topics: agents, agent:<id>, thread:<id>, message:<id>, queue:<id>, drafts:<agent>, draft:<id>, delayed,
// questions, unread, plans:<agent>, progress:<agent>, connection, artifacts, tasks, task:<id>.

const heard = new Map();
const dirty = new Set();
let planned = false;

/** Calls `fn(topic)` soon after `topic` changed, once for many changes. Returns a function that unsubscribes. */
export function on(topics, fn) {
  const list = [topics].flat();
  for (const topic of list) {
    if (!heard.has(topic)) heard.set(topic, new Set());
    heard.get(topic).add(fn);
  }
  return () => {
    for (const topic of list) {
      heard.get(topic)?.delete(fn);
      if (!heard.get(topic)?.size) heard.delete(topic);
    }
  };
}

export function touch(...topics) {
  for (const topic of topics) dirty.add(topic);
  if (planned) return;
  planned = true;
  queueMicrotask(flush);
}

function flush() {
  planned = false;
  const topics = [...dirty];
  dirty.clear();
  const calls = new Map();
  for (const topic of topics) {
    for (const fn of heard.get(topic) ?? []) if (!calls.has(fn)) calls.set(fn, topic);
    // Subscribers of `agent:*` are called for each agent.
    for (const fn of heard.get(topic.replace(/:.*/, ':*')) ?? []) if (topic.includes(':')) fn(topic);
  }
  for (const [fn, topic] of calls) fn(topic);
}

// Lookups

export const now = () => Date.now() + state.skew;
/** The agent whose conversation the address names. */
export const addressed = () => ({ a: route().args[0], '': state.home })[route().name];
export const nameOf = (id) => state.agents.get(id)?.name || id;

/** How far the running tool call of an agent is, as in "40%, copying"; empty if its tool does not report it. */
export function progressOf(id) {
  const one = state.progress.get(id);
  const agent = state.agents.get(id);
  if (!one || agent?.phase !== 'tool' || agent.tool !== one.name) return '';
  const percent = one.total ? `${Math.max(0, Math.min(100, Math.round((100 * one.progress) / one.total)))}%` : '';
  return [percent, one.message].filter(Boolean).join(', ') || String(Math.round(one.progress * 100) / 100);
}

/** The conversation a message belongs to: an agent's id, `system`, or null between agents. */
export function threadOf(message) {
  if (message.from === PERSON) return message.to;
  if (message.to !== PERSON) return null;
  if (message.from !== SYSTEM) return message.from;
  const about = message.payload?.problem?.agent;
  return typeof about === 'string' ? about : SYSTEM;
}

export function thread(id) {
  if (!state.threads.has(id)) {
    state.threads.set(id, { ids: [], requested: false, loaded: false, older: null, pinned: 0, morePlans: false, unread: 0, firstUnread: null, last: null });
  }
  return state.threads.get(id);
}

// The server's definition, BLANK_CHARACTERS in text.py: `trim` disagrees with it about some characters.
const BLANK = /^[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200d\u2028\u2029\u202f\u205f\u2060\u3000\ufeff]*$/;

/** Valid quick replies: 1 to 10 strings, none blank; otherwise none. */
export function optionsOf(message) {
  const options = message.payload?.quickReplies;
  if (!Array.isArray(options) || options.length < 1 || options.length > 10) return null;
  return options.every((one) => typeof one === 'string' && !BLANK.test(one)) ? options : null;
}

export const isOpen = (message) => state.questions.has(message.id) && !message.answer && !state.sending.has(message.id);

export const openQuestions = (agent) =>
  [...state.questions].map((id) => state.messages.get(id)).filter((one) => one && (!agent || one.from === agent));

export const upTo99 = (n) => (n > 99 ? '99+' : String(n));
export const unreadTotal = () => [...state.threads.values()].reduce((sum, one) => sum + one.unread, 0);

/** The text that agent search matches. */
export const called = ({ name, id, role, description }) => `${name} ${id} ${role ?? ''} ${description ?? ''}`.toLowerCase();

/** Input capabilities of an agent's model that the page can name. */
export const takes = (agent) => ['text', 'vision', 'audio', 'file'].filter((kind) => agent?.capabilities?.input?.includes(kind));


// Tasks

export const isOpenTask = (task) => task.state === 'working' || task.state === 'waiting';
export const openTasks = () => [...state.tasks.values()].filter(isOpenTask);

/** The facts of a budget question, or null. Any sender can write a payload, so their types are checked. */
export function budgetOf(message) {
  const { task, reason, limit, about, agents, used } = message?.payload?.budget ?? {};
  const isNumber = (one) => typeof one === 'number' && Number.isFinite(one);
  if (typeof task !== 'string' || !['turns', 'tokens', 'cost', 'minutes'].includes(reason) || !isNumber(limit) || !used || optionsOf(message)?.length !== 2) return null;
  const known = Object.fromEntries(Object.entries(used).filter(([, value]) => isNumber(value)));
  return { task, reason, limit, used: known, currency: state.tasks.get(task)?.currency, about: String(about ?? ''), agents: Array.isArray(agents) ? agents.map(String) : [] };
}

/** What a task has used, in words. An unknown cost is left out. */
export function usedWords({ turns = undefined, inputTokens = 0, outputTokens = 0, cost = null, modelMs = 0 }, currency) {
  return [turns !== undefined && many('turns', turns), many('tokens', inputTokens + outputTokens), cost > 0 && money(cost, currency),
    modelMs >= 50 && t('modelTime', { time: duration(modelMs) })].filter(Boolean).join(' · ');
}

/** A problem in the page's language: the server stores its category, and facts such as the service and its HTTP status. */
export function problemText(problem) {
  const facts = [problem.service, problem.status && `HTTP ${problem.status}`].filter(Boolean).join(', ');
  return t(isKnownProblem(problem) ? `problem_${problem.category}` : 'problem_other') + (facts && ` (${facts})`);
}
const isKnownProblem = (problem) => typeof problem?.category === 'string' && t(`problem_${problem.category}`) !== `problem_${problem.category}`;

/** The notice that messages were not delivered, in the page's language; undefined for any other message. */
export function undeliveredText({ from, payload }) {
  const { kind, reason, recipients, count: n } = payload?.notice ?? {};
  if (from !== SYSTEM || kind !== 'undeliverable' || t(`dead_${reason}`) === `dead_${reason}`) return undefined;
  return t('deadNotice', { n: many('messages', n), names: recipients.map(nameOf).join(t('comma')), why: t(`dead_${reason}`) });
}

/** The text of a message in the page's language: of a notice, a problem, a budget question and its answer; otherwise as it was written. */
export function textOf(message) {
  const budget = budgetOf(message);
  if (budget) {
    const { reason, limit, about, currency } = budget;
    return t(`budgetOf_${reason}`, { text: about, n: reason === 'cost' ? money(limit, currency) : count(limit) });
  }
  const translated = translationOf(message);
  if (translated) return translated.text;
  if (message.from === SYSTEM && isKnownProblem(message.payload?.problem)) return problemText(message.payload.problem);
  const undelivered = undeliveredText(message);
  if (undelivered) return undelivered;
  const approval = approvalOf(message);
  if (approval) return t('approvalAsk', { tool: approval.tool });
  const answered = message.option !== undefined && message.inReplyTo && state.messages.get(message.inReplyTo);
  return (answered && (budgetOf(answered) || approvalOf(answered)) && optionWords(answered)[message.option]) || String(message.payload?.text ?? '');
}

/** The facts of a question whether a tool call may run, or null. */
export function approvalOf(message) {
  const { tool, arguments: given } = message?.payload?.approval ?? {};
  if (typeof tool !== 'string' || optionsOf(message)?.length !== 2) return null;
  return { tool, given: given !== null && typeof given === 'object' ? given : {} };
}

/** The greeting of the tour in the page's language; undefined for any other message. */
function translationOf({ from, payload }) {
  if (!isScripted(state.agents.get(from))) return undefined;
  const { text, quickReplies } = payload?.translations?.[lang()] ?? {};
  const has = typeof text === 'string' && Array.isArray(quickReplies) && quickReplies.length === payload.quickReplies?.length;
  return has ? { text, quickReplies: quickReplies.map(String) } : undefined;
}

/** True for an agent that the script of the tour answers for. */
export const isScripted = (agent) => ['tour', 'tour-sees'].includes(agent?.service);

/** The options of a question as they are shown. */
export const optionWords = (message) => (budgetOf(message) ? [t('continue'), t('stop')] : approvalOf(message) ? [t('approve'), t('deny')] : translationOf(message)?.quickReplies ?? optionsOf(message));

/** What is sent if an option is chosen: the guide of the tour answers in the language of the option. */
export const optionSent = (message, option) => (translationOf(message)?.quickReplies ?? optionsOf(message))[option];

/** A text without Markdown syntax. */
export const unmarked = (text) => text.replace(/```\w*|^[-|: ]+$|^[ >#]*(- \[.\]|[-*+>#]+) |(?<!\w)[*_`~]+|[*_`~]+(?!\w)/gm, '')
  .replace(/\[([^\]]*)\]\([^)]*\)/g, '$1').replace(/[\s|]+/g, ' ').trim();

/** A message's text in one line without Markdown syntax, for previews and screen readers. */
export const plainText = (message) => unmarked(textOf(message));

// Messages

export function keep(message) {
  const known = state.messages.get(message.id);
  state.messages.set(message.id, known ? Object.assign(known, message) : message);
  return known ?? message;
}

/** Inserts a delivered message into its conversation, in order and only once. */
export function join(message) {
  const id = threadOf(message);
  if (!id || !message.deliveredAt || message.state === 'withdrawn') return;
  const one = thread(id);
  if (!one.last || one.last.deliveredAt <= message.deliveredAt) one.last = message;
  // A page that is being loaded may be older than the message.
  if (one.requested && !one.ids.includes(message.id)) {
    let at = one.ids.length;
    while (at > 0 && state.messages.get(one.ids[at - 1])?.deliveredAt > message.deliveredAt) at -= 1;
    one.ids.splice(at, 0, message.id);
  }
  touch(`thread:${id}`, 'threads');
}

export function part(message) {
  const id = threadOf(message);
  const one = id && state.threads.get(id);
  if (!one) return;
  one.ids = one.ids.filter((other) => other !== message.id);
  touch(`thread:${id}`);
}

/** Merges a page of a conversation. Messages that are not in `had`, the ids before the request, arrived meanwhile and follow it. */
function joinPage(one, items, where, had = new Set()) {
  const ids = items.map((item) => keep(item).id);
  items.forEach(settle);
  const fresh = new Set(ids);
  const rest = one.ids.filter((id) => !fresh.has(id));
  if (where === 'older') one.ids = [...ids, ...rest];
  else {
    const first = items[0]?.deliveredAt ?? '';
    const linked = one.loaded && (rest.length === 0 || ids.some((id) => one.ids.includes(id)));
    const before = linked ? rest.filter((id) => (state.messages.get(id)?.deliveredAt ?? '') <= first) : [];
    const last = items.at(-1)?.deliveredAt ?? '';
    const after = rest.filter((id) => !had.has(id) && (state.messages.get(id)?.deliveredAt ?? '') > last);
    one.ids = [...before, ...ids, ...after];
    return before.length > 0;
  }
  return true;
}

export async function loadThread(agent, limit = 50) {
  const one = thread(agent);
  const had = new Set(one.ids);
  one.requested = true;
  const page = await query(`/threads/${encodeURIComponent(agent)}/messages`, { limit });
  const linked = joinPage(one, page.items, 'latest', had);
  if (!one.loaded || !linked) one.older = page.next;
  one.loaded = true;
  page.items.forEach(setOpen);
  touch(`thread:${agent}`);
}

export async function loadOlder(agent) {
  const one = thread(agent);
  const before = one.older;
  if (!before) return;
  const page = await query(`/threads/${encodeURIComponent(agent)}/messages`, { before, limit: 200 });
  if (one.older !== before) return; // a snapshot has replaced the messages after this page
  joinPage(one, page.items, 'older');
  one.older = page.next;
  touch(`thread:${agent}`);
  readOlderPlans(agent).catch(() => {});
}

/** Runs `work`, which loads old messages and shows one of them. Until it has ended, the conversation keeps all that is loaded. */
export async function unshortened(agent, work) {
  const one = thread(agent);
  one.pinned += 1;
  try {
    return await work();
  } finally {
    one.pinned -= 1;
  }
}

/** Loads a message, or what an agent said before a tool call, and all that is later. Call it within `unshortened`. */
export async function loadAround(agent, id) {
  const one = thread(agent);
  const said = isSaid(id) && id.slice(id.lastIndexOf('_') + 1);
  const has = () => (said ? state.messages.get(one.ids[0])?.deliveredAt < said : one.ids.includes(id));
  while (!has() && one.older) await loadOlder(agent);
  if (!said) return;
  await readPlans(agent);
  await readOlderPlans(agent, { until: said, most: Infinity });
}

// What an agent said before a tool call is part of a plan. Pages show it as a message of this id.

const idOfPlan = ({ turn, step, at }) => `said_${turn}_${step}_${at}`;
export const isSaid = (id) => id.startsWith('said_');
export const saidIn = (plan) => ({ id: idOfPlan(plan), from: plan.agent, to: PERSON, payload: { text: plan.text }, rendered: plan.rendered, deliveredAt: plan.at, state: 'taken' });

export function setOpen(message) {
  const open = message.to === PERSON && message.from !== SYSTEM && optionsOf(message) && !message.answer;
  const live = open && (message.state === 'pending' || message.state === 'taken');
  if (live === state.questions.has(message.id)) return;
  if (live) state.questions.add(message.id);
  else state.questions.delete(message.id);
  touch('questions');
}

const asking = new Set();

/** Loads an agent's tool runs, once for many requests. */
export function loadPlans(agent) {
  if (asking.has(agent)) return;
  asking.add(agent);
  setTimeout(() => {
    asking.delete(agent);
    readPlans(agent).catch(() => {});
  }, 120);
}

const olderPlans = new Map(); // agent -> cursor of the page before the loaded ones, null at the beginning
const readingPlans = new Map(); // agent -> promise of the last call of `readOlderPlans`
const MOST_PAGES = 20; // that are read without a request of the person
const PAGES_ASKED = 5;
const BEFORE_ALL = '0'; // an earlier time than any

async function readPlans(agent) {
  const began = performance.now();
  const page = await query('/runs', { agent, limit: 50 });
  const last = state.plans.get(agent)?.at(-1)?.at;
  if (!last || !page.items.some((plan) => plan.at <= last)) {
    state.plans.delete(agent); // what is between is not known
    olderPlans.set(agent, page.next);
  }
  joinPlans(agent, page.items);
  // The text of a reply that became a plan is in the plan now.
  for (const draft of [...state.drafts.values()]) if (draft.agent === agent && draft.plannedAt < began) state.drafts.delete(draft.id);
  touch(`plans:${agent}`);
  await readOlderPlans(agent);
}

function joinPlans(agent, plans) {
  const known = new Map((state.plans.get(agent) ?? []).map((plan) => [idOfPlan(plan), plan]));
  for (const plan of plans) known.set(idOfPlan(plan), plan);
  state.plans.set(agent, [...known.values()].sort((a, b) => (a.at < b.at ? -1 : a.at > b.at ? 1 : a.turn - b.turn || a.step - b.step)));
}

/** Loads plans as far back as messages are loaded, or the time `until`, but at most `most` pages. Calls for one agent follow each other. */
function readOlderPlans(agent, { until = '', most = MOST_PAGES } = {}) {
  const before = readingPlans.get(agent) ?? Promise.resolve();
  const mine = before.catch(() => {}).then(() => readPlanPages(agent, until, most));
  readingPlans.set(agent, mine);
  return mine;
}

async function readPlanPages(agent, until, most) {
  const one = thread(agent);
  const first = () => state.messages.get(one.ids[0])?.deliveredAt;
  const isBack = (time) => state.plans.get(agent)?.[0]?.at < time;
  try {
    for (let pages = 0; pages < most; pages += 1) {
      const before = olderPlans.get(agent);
      const time = until || first();
      if (!time || !before || isBack(time)) return;
      const page = await query('/runs', { agent, before, limit: 100 });
      if (olderPlans.get(agent) !== before) continue; // a newer page does not follow the plans before it
      olderPlans.set(agent, page.next);
      joinPlans(agent, page.items);
      touch(`plans:${agent}`);
    }
  } finally {
    // Between loaded messages, or before the first message, there are plans that are not loaded.
    one.morePlans = Boolean(olderPlans.get(agent)) && !(one.older && isBack(first()));
    touch(`plans:${agent}`);
  }
}

/** Loads some plans before the loaded ones. */
export const loadOlderPlans = (agent) => readOlderPlans(agent, { until: BEFORE_ALL, most: PAGES_ASKED });

/** Keeps the newest messages of a conversation, and the plans between them. The others are read again when they are needed. */
export function shorten(agent, most) {
  const one = thread(agent);
  if (!one.loaded || one.pinned || one.ids.length <= most) return;
  one.ids = one.ids.slice(-most);
  one.older = one.ids[0];
  const first = state.messages.get(one.older).deliveredAt;
  const plans = state.plans.get(agent) ?? [];
  const kept = plans.filter((plan, at) => plan.at >= first || at === plans.length - 1);
  if (kept.length < plans.length) olderPlans.set(agent, kept[0].position);
  state.plans.set(agent, kept);
  one.morePlans = false;
  touch(`thread:${agent}`, `plans:${agent}`);
}

/** Functions of open screens: the ids of messages that the screen shows. */
export const holders = new Set();

// The snapshot

let fetching = null;

/** Reloads everything from the server. Concurrent calls share one request. */
export function resync() {
  fetching ??= readSnapshot().finally(() => {
    fetching = null;
  });
  return fetching;
}

/** Waits for a running snapshot. Events wait too: an older snapshot would undo them. */
export async function snapshotRead() {
  while (fetching) await fetching.catch(() => {});
}

async function readSnapshot() {
  const seen = await get('/snapshot');
  Object.assign(state, { epoch: seen.epoch, seq: seen.seq, allPaused: seen.paused, configuration: seen.configuration, skew: Date.parse(seen.serverTime) - Date.now() });
  state.agents = new Map(seen.agents.map((one) => [one.id, one]));
  early.clear();
  if (seen.threads.length >= seen.threadCount) for (const one of state.threads.values()) Object.assign(one, { last: null, unread: 0, firstUnread: null });
  for (const each of seen.threads) {
    Object.assign(thread(each.agent), { last: keep(each.last), unread: each.unread, firstUnread: each.firstUnread });
  }
  state.queues = new Map();
  for (const message of seen.queues) queue(message.to).push(keep(message).id);
  [...seen.queues, ...seen.delayed].forEach(settle);
  state.delayed = new Map(seen.delayed.map((one) => [one.id, keep(one)]));
  state.questions = new Set(seen.openQuestions.map((one) => keep(one).id));
  state.tasks = new Map((seen.tasks ?? []).map((one) => [one.id, one]));
  state.moreTasks = Math.max(0, (seen.taskCount ?? 0) - state.tasks.size);
  const again = [...state.threads].filter(([, one]) => one.requested).map(([id]) => id);
  state.booted = true;
  touch('agents', 'delayed', 'questions', 'unread', 'threads', 'tasks', 'society', 'snapshot');
  for (const id of [...state.agents.keys(), ...again]) touch(`agent:${id}`, `queue:${id}`);
  await Promise.all(again.map((id) => loadThread(id, 200).catch(() => {})));
  for (const [clientId, { messageId }] of state.locals) if (state.messages.has(messageId)) dropLocal(clientId); // no event will
  again.forEach(loadPlans);
  if (seen.agentCount > seen.agents.length) readAgents().catch(() => {});
}

/** Loads the rest: a snapshot has only the first 200. */
async function readAgents() {
  for (let after; after !== null; ) {
    const page = await query('/agents', { after, limit: 200 });
    for (const one of page.items) {
      if (state.agents.has(one.id)) continue;
      state.agents.set(one.id, withNews(one, early.get(one.id)));
      touch('agents', `agent:${one.id}`);
    }
    after = page.next;
  }
}

/** Statuses of agents that are not loaded yet. */
export const early = new Map();

/** An agent after an event. A new state ends what is known about the old one. */
export function withNews(agent, news) {
  const after = { ...agent, ...news };
  delete after.prev;
  if (news?.state) for (const key of ['phase', 'tool', 'step', 'why', 'problem']) if (!(key in news)) delete after[key];
  return after;
}

export const queue = (agent) => {
  if (!state.queues.has(agent)) state.queues.set(agent, []);
  return state.queues.get(agent);
};

// Sent messages that are not confirmed. The browser keeps them, so that a reload loses none.

/** The name of a kept message in the browser's storage, and of the lock of the tab that sends it. */
export const keptAs = (clientId) => `coterie.sent.${clientId}`;
const KEPT = keptAs('');
const MOST_KEPT = 20;
const CLOCKS_MS = 2_000; // by which the clocks of page and server may differ

/** A message that is being sent. `again`: what sends or restores it. */
export function localOf(again, createdAt = new Date(now()).toISOString()) {
  const { agent, text, files, replyTo = null, asksBack = false, clientId } = again;
  const payload = { ...(text.trim() && { text }), ...(files.length && { attachments: files }) };
  return { local: true, clientId, to: agent, from: PERSON, payload, inReplyTo: replyTo, asksBack, status: 'sending', createdAt, again };
}

/** A kept message as one whose send failed; undefined if it is broken or gone. */
function readKept(key) {
  try {
    const { again, createdAt, status } = JSON.parse(localStorage.getItem(key));
    const { agent, text, files, clientId } = again;
    const isWhole = key === keptAs(clientId) && typeof agent === 'string' && typeof text === 'string' && !Number.isNaN(Date.parse(createdAt));
    return isWhole && files.every((one) => typeof one.artifactRef === 'string') ? { ...localOf(again, createdAt), status: 'failed', interrupted: status === 'sending' } : undefined;
  } catch {
    return undefined;
  }
}

/** All kept messages, oldest first. Removes broken ones and all but the newest. */
function readAllKept() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(KEPT));
  const all = keys.map(readKept).filter(Boolean).sort((a, b) => (a.createdAt < b.createdAt ? -1 : 1)).slice(-MOST_KEPT);
  const names = new Set(all.map((one) => keptAs(one.clientId)));
  for (const key of keys) if (!names.has(key)) localStorage.removeItem(key);
  return all;
}

/** Shows the messages that an earlier page kept. */
export function restoreLocals() {
  for (const { clientId } of readAllKept()) {
    const key = keptAs(clientId);
    const show = () => {
      const local = readKept(key);
      if (!local) return;
      showLocal(local);
      if (local.interrupted) lookUp(local);
    };
    // A tab that still sends the message has the lock. Without locks (plain http), Retry finds what arrived.
    if (navigator.locks) navigator.locks.request(key, show).catch(show);
    else show();
  }
  addEventListener('storage', ({ key, newValue }) => {
    const local = newValue === null && key?.startsWith(KEPT) && state.locals.get(key.slice(KEPT.length));
    if (local && local.status === 'failed') hideLocal(local); // another tab sends, edits or has removed it
  });
}

function showLocal(local) {
  state.locals.set(local.clientId, local);
  touch(`thread:${local.to}`, `queue:${local.to}`);
}

function hideLocal(local) {
  state.locals.delete(local.clientId);
  touch(`thread:${local.to}`, `queue:${local.to}`);
}

export function dropLocal(clientId) {
  localStorage.removeItem(keptAs(clientId));
  const local = state.locals.get(clientId);
  if (local) hideLocal(local);
}

export function putLocal(local) {
  const { clientId, again, createdAt, status } = local;
  try {
    localStorage.setItem(keptAs(clientId), JSON.stringify({ again, createdAt, status }));
    readAllKept();
  } catch {
    // The storage is full: a reload loses the message.
  }
  showLocal(local);
}

/** The server has accepted a message. Its event may arrive before or after this call. */
export function confirmLocal(clientId, receipt) {
  const local = state.locals.get(clientId);
  if (!local || state.messages.has(receipt.messageId)) return dropLocal(clientId);
  localStorage.removeItem(keptAs(clientId));
  Object.assign(local, { messageId: receipt.messageId, status: receipt.state === 'pending' ? 'delivered' : receipt.state });
  touch(`thread:${local.to}`, `queue:${local.to}`);
}

/** Removes the local copy of a message that the server has confirmed. */
export function settle(message) {
  if (message.from !== PERSON) return;
  for (const [clientId, local] of state.locals) {
    if (local.messageId === message.id || (local.status === 'sending' && alike(local, message))) return dropLocal(clientId);
    if (local.interrupted && local.to === message.to) lookUp(local);
  }
}

/** True if a message says the same. It may be the one that is being sent, whose answer is still to come. */
const alike = (local, message) =>
  local.to === message.to && !local.messageId && (local.payload.text ?? '') === (message.payload.text ?? '') && local.inReplyTo === message.inReplyTo &&
  Date.parse(message.createdAt) >= Date.parse(local.createdAt) - CLOCKS_MS;

/** Removes a message that an earlier page was sending when it was left, if the server has it. */
async function lookUp(local) {
  if (local.isLookedUp) return;
  local.isLookedUp = true;
  const { items } = await query('/messages', { clientId: local.clientId }).catch(() => ({ items: [] }));
  local.isLookedUp = false;
  if (items.length && state.locals.get(local.clientId) === local) dropLocal(local.clientId);
}

/** Functions called with every event: `(kind, data)`. */
export const watchers = new Set();

/** Time to the next multiple of `ms`, so that all repaints with this interval share a frame. */
export const untilNext = (ms) => ms - (performance.now() % ms);

// One shared timer for all clocks of the page

const ticking = new Set();
let timer = null;

export function everySecond(fn) {
  ticking.add(fn);
  timer ??= setInterval(() => ticking.forEach((one) => one()), 1000);
  return () => {
    ticking.delete(fn);
    if (!ticking.size) timer = clearInterval(timer) ?? null;
  };
}
