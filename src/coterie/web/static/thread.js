// The conversation with one agent.

import { avatar, button, empty, fill, h, icon, setText, toComposer } from './dom.js';
import { post } from './api.js';
import { dayKey, t } from './i18n.js';
import { Feed } from './feed.js';
import { asksAboutBudget, draftView, messageView, problemView, spokenView } from './message.js';
import { agentPath } from './router.js';
import { dropLocal, isSaid, loadAround, loadOlder, loadPlans, loadThread, nameOf, now, on, PERSON, saidIn, state, SYSTEM, takes, thread, threadOf, unshortened } from './state.js';
import { dock } from './shell.js';
import { mountComposer, putBack, retryLocal, sendText } from './composer.js';
import { isQueued, isWaiting, waited } from './waiting.js';

const NEAR_TOP = 1_200;
const READ_MS = 250;
const JOIN_MS = 180_000;
const SEEN_MS = 50; // between two repaints of a reply in progress
const UNSEEN_MS = 500;
let runs = null;
let lines = null;
let current = null;

/** The agent whose conversation opens if the address names none. */
function home() {
  const last = localStorage.getItem('coterie.lastAgent');
  if (state.agents.has(last)) return last;
  const living = [...state.agents.values()].filter((one) => one.state !== 'terminated' && one.kind !== 'person');
  return (living.find((one) => !one.parent) ?? living[0])?.id;
}

export function render(root, { args, query }) {
  const id = args[0] ?? home();
  state.home = id;
  if (!id) return waitForAgents(root);
  return conversation(root, id, query.get('m'));
}

function waitForAgents(root) {
  const say = () => {
    if (state.booted && !state.agents.size) fill(root, empty(t('noAgents'), h('a', { href: '#/setup' }, t('setup'))));
    else if (state.booted) location.replace(agentPath(home()));
  };
  fill(root, bones());
  const composer = mountComposer(dock(), '');
  toWrite(composer);
  say();
  const end = on(['agents', 'snapshot'], say);
  return () => {
    composer.leave();
    end();
  };
}

/** An answer that a message of the person ended. */
const isCutAnswer = (plan) => plan.outcome === 'withdrawn' && !plan.calls.length && plan.text;

/** The time of a message in the agent's history: its own count when sent, the person's when the agent read them. */
const happened = (message) => (message.from === PERSON ? message.takenAt ?? message.deliveredAt : message.deliveredAt);

/** True if a message stands after a plan. At the same time a plan asks for approval or sends, or is withdrawn for what is then read. */
const isAfter = (item, plan) => item.at > plan.at || (item.at === plan.at && (Boolean(plan.interruptedBy) || item.from === plan.agent));

/** In one transaction an answer is sent before the agent reads on, unless it is the answer to what it reads. */
function byTime(a, b) {
  if (a.at !== b.at) return a.at < b.at ? -1 : 1;
  const [mine, theirs] = a.from === PERSON ? [a, b] : [b, a];
  if (mine.from !== PERSON || theirs.from === PERSON) return a.n - b.n;
  return (theirs.answers === mine.id) === (mine === a) ? -1 : 1;
}

const bones = () => h('div', { class: 'skeleton screen-fill', 'aria-hidden': 'true' }, ['', 'bone-mine', ''].map((more) => h('span', { class: `bone bone-bubble ${more}` })));

function missing(root, id) {
  fill(root, empty(t('noSuchAgent', { name: id }), h('a', { href: '#/org' }, t('org'))));
  dock().hidden = true;
}

const touched = matchMedia('(pointer: coarse)');

/** What is typed next goes to the composer. Not with touch: the keyboard on the screen would cover the conversation. */
function toWrite(composer) {
  if (!touched.matches && !document.querySelector('dialog[open]')) composer.focus();
}

/** Scrolls to a message of the open conversation; false if it is not in it. */
export const showMessage = (message) => current?.show(message) ?? false;
export const openComposer = () => current?.composer;
export const openAgent = () => current?.id;
/** True if the conversation of the agent is shown, scrolled to its end. */
export const followsEnd = (agent) => current?.id === agent && current.feed.follow;

function conversation(root, id, wanted) {
  localStorage.setItem('coterie.lastAgent', id);
  const list = h('div', { class: 'feed', role: 'feed', 'aria-label': t('thread', { name: nameOf(id) }), 'aria-busy': 'true' });
  const older = h('div', { class: 'older meta', hidden: true, role: 'status' });
  const scroller = h('div', { class: 'thread', role: 'region', tabindex: '0', 'aria-label': t('thread', { name: nameOf(id) }), 'data-testid': 'thread' }, older, list);
  const jump = button({ class: 'jump', hidden: true, 'data-testid': 'jump', onclick: () => {
    feed.toEnd();
    toComposer({ preventScroll: true });
  } });
  const blank = h('div', { class: 'screen-fill', hidden: true });
  fill(root, scroller, blank, jump);
  const one = thread(id);
  one.keepUnread = false;
  let line = null; // {id, n}: first unread message when the conversation was opened, and how many were unread
  let newBelow = 0;
  let newest; // last message when it was painted
  let busy = false;

  const acts = {
    replyTo: (message) => composer.replyTo(message),
    goOn: () => sendText(id, t('continueText')),
    retry: retryLocal,
    edit: (local) => {
      putBack(id, local);
      dropLocal(local.clientId);
    },
    drop: (local) => dropLocal(local.clientId),
    get taskLine() {
      return lines?.taskLine;
    },
  };
  const make = (item) => {
    if (item.kind === 'draft') return draftView(item, () => (feed.isSeen(item.key) ? SEEN_MS : UNSEEN_MS));
    if (item.kind === 'runs') return runs.runsView(item);
    if (item.kind === 'earlier') return runs.earlierView(id);
    if (item.kind === 'withdrawn' || item.kind === 'said') return spokenView(item);
    if (item.kind === 'problem') return problemView(id);
    return messageView(item, acts);
  };
  const feed = new Feed(scroller, list, make, moved);
  const composer = mountComposer(dock(), id);
  current = { id, composer, show, feed };
  toWrite(composer);

  // Items of the feed

  function items() {
    const all = [];
    const newest = hasProblem() && state.messages.get(one.ids.at(-1));
    const notice = newest?.from === SYSTEM && newest.payload.problem ? newest.id : null; // the problem card has the same text
    for (const message of one.ids.map((each) => state.messages.get(each))) {
      if (isWaiting(message, id) || message.id === notice) continue;
      const at = happened(message);
      if (message.day?.at !== at) message.day = { at, key: dayKey(at) };
      all.push({ key: `m:${message.id}`, kind: 'message', id: message.id, at, from: message.from, dayKey: message.day.key, answers: message.inReplyTo, n: all.length });
    }
    all.sort(byTime);
    const oldest = one.older ? all[0]?.at ?? '' : '';
    return withEarlier(finish(groups(all, oldest), notice));
  }

  /** Adds a button before the first plan, if earlier ones are not loaded. */
  function withEarlier(all) {
    const first = runs && one.morePlans ? all.findIndex((item) => item.kind === 'runs' || item.said?.state) : -1;
    return first < 0 ? all : [...all.slice(0, first), { key: 'earlier', kind: 'earlier' }, ...all.slice(first)];
  }

  function hasProblem() {
    const agent = state.agents.get(id);
    return (agent?.state === 'blocked' || agent?.phase === 'retry') && !asksAboutBudget(id);
  }

  /** Puts what the agent said before tool calls, the calls, and withdrawn answers between the messages, by time. */
  function groups(all, oldest) {
    const plans = runs ? (state.plans.get(id) ?? []).filter((plan) => plan.at >= oldest) : [];
    let at = 0;
    const out = [];
    for (const plan of [...plans, null]) {
      while (at < all.length && (!plan || !isAfter(all[at], plan))) out.push(all[at++]);
      if (!plan) continue;
      const said = saidIn(plan);
      if (plan.text.trim()) out.push({ key: `m:${said.id}`, kind: plan.outcome === 'withdrawn' ? 'withdrawn' : 'said', said, at: plan.at, from: id });
      const last = out.at(-1);
      if (last?.kind === 'runs') last.plans.push(plan);
      else if (runs.callsOf([plan]).length) out.push({ key: `r:${said.id}`, kind: 'runs', plans: [plan], at: plan.at, agent: id });
    }
    for (const item of out) if (item.kind === 'runs') item.calls = runs.callsOf(item.plans);
    return out;
  }

  function finish(all, said) {
    for (const local of state.locals.values()) {
      if (local.to === id && !isQueued(local) && local.status !== 'delayed') all.push({ key: `l:${local.clientId}`, kind: 'local', local, at: local.createdAt, from: PERSON });
    }
    for (const draft of state.drafts.values()) {
      if (draft.agent === id && draft.text) all.push({ key: `d:${draft.id}`, kind: 'draft', id: draft.id, at: new Date(draft.at).toISOString() });
    }
    if (hasProblem()) all.push({ key: 'problem', kind: 'problem', id: said, at: new Date(now()).toISOString() });
    decorate(all);
    return all;
  }

  /** Adds day separators, the unread line, interjection marks and task lines; hides the name on consecutive messages. */
  function decorate(all) {
    const breaks = breaksOf();
    const tasks = new Map(); // task -> the person's last message of it
    let day = null;
    let before = null;
    for (const item of all) {
      const key = item.dayKey ?? dayKey(item.at);
      item.day = key === day ? null : item.at;
      day = key;
      item.news = line && item.id === line.id ? line.n : 0;
      item.broke = breaks.get(item.id) ?? null;
      item.joined = before && !item.day && !item.news && !item.broke && item.from && before.from === item.from && Date.parse(item.at) - Date.parse(before.at) < JOIN_MS;
      before = item;
      const task = item.from === PERSON && item.id && state.messages.get(item.id).task;
      if (task) tasks.set(task, item);
    }
    for (const item of tasks.values()) item.task = true;
  }

  function breaksOf() {
    const found = new Map();
    for (const plan of state.plans.get(id) ?? []) {
      const cut = runs ? runs.callsOf([plan]).filter((call) => call.withdrawn).length : 0;
      if (plan.interruptedBy && (cut || isCutAnswer(plan))) found.set(plan.interruptedBy, { withdrawn: cut });
    }
    for (const [message, broke] of state.breaks) if (waited.has(message)) found.set(message, broke);
    return found;
  }

  function paint() {
    if (!one.loaded) return;
    const all = items();
    const at = one.ids.lastIndexOf(newest);
    if (at >= 0 && !feed.follow) newBelow += one.ids.slice(at + 1).filter((each) => state.messages.get(each)?.to === PERSON).length;
    newest = one.ids.at(-1);
    blank.hidden = all.length > 0;
    if (!all.length) fill(blank, emptyThread(id, composer));
    feed.set(all, one.older ? -1 : all.length);
    read();
  }

  // History

  const open = () => unshortened(id, openWanted);

  async function openWanted() {
    if (!one.loaded) fill(blank, bones()).hidden = false;
    try {
      if (!one.loaded || wanted) await loadThread(id);
      if (wanted) await Promise.all([loadAround(id, wanted), isSaid(wanted) && loadParts()]);
    } catch (error) {
      if (current?.feed !== feed) return;
      if (error.code === 'unknown_agent') return missing(root, id);
      list.setAttribute('aria-busy', 'false');
      blank.hidden = false;
      return fill(blank, empty(t('threadFailed'), button({ class: 'plain-btn', onclick: open }, t('retry'))));
    }
    if (current?.feed !== feed) return;
    list.setAttribute('aria-busy', 'false');
    mark();
    paint();
    if (wanted) show(state.messages.get(wanted) ?? { id: wanted }, true);
    else if (line) feed.show(`m:${line.id}`, 120);
    loadPlans(id);
    await loadParts();
    if (current?.feed === feed) paint();
  }

  async function loadParts() {
    if (!runs) [runs, lines] = await Promise.all([import('./runs.js'), import('./task_line.js')]);
  }

  function mark() {
    if (!one.firstUnread || !one.unread) return;
    line = { id: one.firstUnread, n: one.unread };
  }

  async function fetchOlder() {
    if (busy || !one.older || !one.loaded) return;
    busy = true;
    list.setAttribute('aria-busy', 'true');
    older.hidden = false;
    setText(older, t('loadingOlder'));
    try {
      await loadOlder(id);
      older.hidden = true;
      busy = false;
      feed.reportMove(); // the viewport may still be near the top, without another scroll event
    } catch {
      // Retried by a button only, to avoid endless requests on a broken connection.
      fill(older, h('span', {}, t('olderFailed')), button({ class: 'text-btn', onclick: () => {
        busy = false;
        fetchOlder();
      } }, t('retry')));
    }
    list.setAttribute('aria-busy', 'false');
  }

  // The viewport

  function moved({ left, top, follow }) {
    if (follow) newBelow = 0;
    const far = left > 240 && !follow;
    jump.hidden = !far && !newBelow;
    const label = newBelow === 1 ? t('newMessage') : newBelow ? t('newMessages', { n: newBelow }) : t('toEnd');
    if (jump.getAttribute('aria-label') !== label) {
      jump.setAttribute('aria-label', label);
      fill(jump, icon('down'), newBelow > 0 && h('span', {}, label));
    }
    if (top < NEAR_TOP) fetchOlder();
    read();
  }

  let reading = null;
  let readUpto = null;
  function read() {
    reading ??= setTimeout(() => {
      reading = null;
      const last = state.messages.get(one.ids.findLast((each) => state.messages.get(each).to === PERSON));
      if (!last || !one.unread || one.keepUnread || document.hidden || last.id === readUpto || current?.feed !== feed) return;
      if (!feed.seen().some((item) => item.id === last.id)) return;
      readUpto = last.id;
      post('/read', { thread: id, upto: last.id }).catch(() => {
        readUpto = null;
      });
    }, READ_MS);
  }

  function show(message, flash = false) {
    if (threadOf(message) !== id && !flash) return false;
    const el = feed.show(`m:${message.id}`);
    if (!el) return false;
    if (flash) el.classList.add('is-found');
    return true;
  }

  scroller.addEventListener('keydown', (event) => walk(event, feed, scroller));
  document.addEventListener('visibilitychange', read);
  const ends = [
    on([`thread:${id}`, `plans:${id}`, `drafts:${id}`, `queue:${id}`, `agent:${id}`, 'questions', 'snapshot'], paint),
  ];
  if (state.booted) open();
  else {
    fill(blank, bones()).hidden = false;
    const once = on('snapshot', () => {
      once();
      open();
    });
    ends.push(once);
  }
  return () => {
    current = null;
    clearTimeout(reading);
    document.removeEventListener('visibilitychange', read);
    ends.forEach((end) => end());
    feed.end();
    composer.leave();
  };
}

/** Keyboard: up and down between messages, Enter into one, Escape back to the composer. */
function walk(event, feed, scroller) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const inside = event.target.closest('.feed-item');
  const own = event.target === scroller || event.target === inside;
  if (event.key === 'Escape') {
    if (inside && event.target !== inside) inside.focus();
    else toComposer();
    return event.preventDefault();
  }
  if (!own) return;
  if (event.key === 'Enter' && inside) {
    inside.querySelector('button:not([tabindex="-1"]), .quick-reply-btn, a[href], summary, [tabindex="0"]')?.focus();
    return event.preventDefault();
  }
  const at = inside ? feed.at.get(inside.dataset.key) ?? -1 : -1;
  const to = { ArrowUp: inside ? at - 1 : feed.items.length - 1, ArrowDown: inside ? at + 1 : feed.items.length - 1, Home: 0, End: feed.items.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const item = feed.items[Math.min(Math.max(to, 0), feed.items.length - 1)];
  if (!item) return;
  const view = feed.views.get(item.key);
  const box = scroller.getBoundingClientRect();
  const shown = view?.el.getBoundingClientRect();
  const whole = shown && shown.top >= box.top && shown.bottom <= box.bottom;
  const el = whole ? view.el : feed.show(item.key, event.key === 'ArrowDown' || event.key === 'End' ? Math.max(24, box.height - (shown?.height ?? 120) - 24) : 24);
  el?.focus({ preventScroll: true });
}

function emptyThread(id, composer) {
  const one = state.agents.get(id);
  const kinds = takes(one);
  const { role, parent } = one ?? {};
  const lines = [t('starter1'), role ? t('starterRole', { role }) : t('starter2'), parent ? t('starterParent', { name: nameOf(parent) }) : t('starter3')];
  const starters = lines.map((text) => button({ class: 'plain-btn starter', text, onclick: () => {
    composer.refill({ text });
    composer.focus();
  } }));
  return h('div', { class: 'empty', 'data-testid': 'empty-thread' }, one && avatar(one, { size: 'large' }), h('p', { class: 'empty-name', dir: 'auto' }, nameOf(id)),
    role && h('p', { class: 'empty-role', dir: 'auto' }, role),
    kinds.length > 0 && h('p', { class: 'empty-caps meta' }, t('takesIn'), kinds.map((kind) => h('span', { class: 'cap' }, icon(kind), t(`can_${kind}`)))),
    one?.state !== 'terminated' && [h('p', { class: 'meta' }, t('firstWords')), h('div', { class: 'starters' }, starters)]);
}
