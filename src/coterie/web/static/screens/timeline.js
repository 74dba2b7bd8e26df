// All messages and tool runs, newest first. The filters are part of the address.

import { query } from '../api.js';
import { button, empty, fill, h, sync } from '../dom.js';
import { many, t } from '../i18n.js';
import { who } from '../message.js';
import { quickReplies } from '../quick_replies.js';
import { callRow, callsOf } from '../runs.js';
import { PERSON, SYSTEM, plainText, keep, on, state, unmarked, watchers } from '../state.js';
import { choice, failed, field, when } from './parts.js';

const HOURS = { hour: 1, day: 24, week: 168 };

export function render(root, { query: asked }) {
  const filters = { agent: asked.get('agent') ?? '', kind: asked.get('kind') ?? '', time: asked.get('time') ?? '' };
  const list = h('ol', { class: 'items timeline', 'aria-label': t('timeline') });
  const foot = h('div');
  let sources = {};
  let items = new Map();
  let turn = 0;

  const agent = choice([], '', (value) => change({ agent: value }));
  const listAgents = () => {
    const names = [...state.agents.values()].map((one) => [one.id, one.name]);
    fill(agent, [['', t('allAgents')], ...names].map(([value, text]) => h('option', { value, text })));
    agent.value = filters.agent;
  };
  const kind = choice([['', t('timelineAnyKind')], ['message', t('timelineMessages')], ['tool', t('timelineTools')]], filters.kind, (value) => change({ kind: value }));
  const time = choice([['', t('timelineAnyTime')], ['hour', t('timelineHour')], ['day', t('timelineDay')], ['week', t('timelineWeek')]], filters.time, (value) => change({ time: value }));

  const change = (wanted) => {
    Object.assign(filters, wanted);
    const set = new URLSearchParams(Object.entries(filters).filter(([, value]) => value));
    history.replaceState(null, '', set.size ? `#/timeline?${set}` : '#/timeline');
    again();
  };
  const again = () => {
    turn += 1;
    items = new Map();
    sources = {
      messages: { path: '/messages', open: filters.kind !== 'tool', take: (one) => ({ id: `m${one.id}`, at: one.createdAt, message: keep(one) }) },
      runs: { path: '/runs', open: filters.kind !== 'message', take: (one) => ({ id: `r${one.agent}.${one.turn}.${one.step}.${one.at}`, at: one.at, run: one }) },
    };
    load();
  };
  const load = async () => {
    const mine = turn;
    fill(foot, h('p', { class: 'meta', text: t('loading') }));
    try {
      await Promise.all(Object.values(sources).filter((one) => one.open).map((one) => fetchPage(one, mine)));
      if (mine === turn) draw();
    } catch {
      if (mine === turn) fill(foot, failed(t('notLoaded'), load));
    }
  };
  const fetchPage = async (source, mine) => {
    const page = await query(source.path, { agent: filters.agent, before: source.next, limit: 50 });
    if (mine !== turn) return;
    for (const one of page.items.map(source.take)) items.set(one.id, one);
    source.next = page.next;
    source.oldest = page.items.length ? source.take(page.items.at(-1)).at : '';
    source.open = Boolean(page.next);
  };
  const draw = () => {
    // Show only the time range that every source has loaded; older items would have gaps.
    const open = Object.values(sources).filter((one) => one.open);
    const edge = open.reduce((latest, one) => (one.oldest > latest ? one.oldest : latest), '');
    const since = filters.time ? new Date(Date.now() + state.skew - HOURS[filters.time] * 3_600_000).toISOString() : '';
    const shown = [...items.values()].filter((one) => one.at >= edge && one.at >= since).sort(newestFirst);
    const wanted = shown.filter((one) => one.message || runCalls(one.run).length || one.run.text.trim());
    sync(list, groupsOf(wanted).map(groupRow));
    const more = open.length && edge >= since;
    sync(foot, more ? button({ class: 'plain-btn', text: t('older'), onclick: load }) : shown.length ? null : empty(t('timelineNone')));
  };
  const refresh = async () => {
    const mine = turn;
    for (const source of Object.values(sources)) {
      if (source.path === (filters.kind === 'tool' ? '/messages' : filters.kind === 'message' ? '/runs' : '')) continue;
      const page = await query(source.path, { agent: filters.agent, limit: 50 }).catch(() => null);
      if (mine !== turn || !page) return;
      // New items first: the server's order decides between items of the same millisecond.
      const fresh = new Map(page.items.map(source.take).map((one) => [one.id, one]));
      items = new Map([...fresh, ...items, ...fresh]); // the place of a key is its first one, the value its last one
    }
    draw();
  };

  fill(
    root,
    h('div', { class: 'filters' }, field(t('timelineAgent'), agent), field(t('timelineKind'), kind), field(t('timelineTime'), time)),
    list,
    foot,
  );
  listAgents();
  again();
  const stops = [on('snapshot', again), on('agents', () => {
    listAgents();
    draw();
  })];
  let soon = null;
  const watch = (kind) => {
    if (!/^(message|delayed|queue|tool)/.test(kind)) return;
    soon ??= setTimeout(() => {
      soon = null;
      refresh();
    }, 400);
  };
  watchers.add(watch);
  return () => {
    turn += 1;
    clearTimeout(soon);
    watchers.delete(watch);
    stops.forEach((stop) => stop());
  };
}

/** Items of one task together, the task with the newest item first. */
function groupsOf(items) {
  const groups = new Map();
  for (const one of items) {
    const task = (one.message ?? one.run).task ?? null;
    const key = task ?? one.id;
    if (!groups.has(key)) groups.set(key, { key, task, items: [] });
    groups.get(key).items.push(one);
  }
  return [...groups.values()];
}

function groupRow({ key, task, items }) {
  const rows = items.map((one) => (one.run ? runRow(one.run, one.id) : messageRow(one.message)));
  const plain = (message) => message && plainText(message);
  const text = plain(state.messages.get(task)) || unmarked(state.tasks.get(task)?.text ?? '') || plain(items.at(-1).message) || t('noText');
  return h('li', { class: 'timeline-group', 'data-testid': 'timeline-group', data: { key } },
    task && items.length > 1 && h('p', { class: 'timeline-head' }, h('a', { href: `#/tasks/${encodeURIComponent(task)}`, dir: 'auto' }, text.slice(0, 120)), h('span', { class: 'meta' }, many('messages', items.filter((one) => one.message).length))),
    h('ol', { class: items.length > 1 ? 'items items-of-task' : 'items', data: { key: 'items' } }, rows));
}

/** The calls of a run without sent messages, which are entries of their own. */
const runCalls = (run) => callsOf([run], true).filter((call) => call.withdrawn || call.name !== 'send_message' || call.state !== 'done');

const newestFirst = (a, b) => (a.at < b.at ? 1 : a.at > b.at ? -1 : 0);

function messageRow(message) {
  const mine = message.to === PERSON;
  return h(
    'li',
    { class: 'item', data: { messageId: message.id, key: message.id } },
    h(
      'p',
      { class: 'item-head' },
      h('span', { dir: 'auto', text: `${who(message.from)} → ${who(message.to)}` }),
      message.state !== 'taken' && h('span', { class: `tag ${message.state}`, text: t(mine && message.state === 'pending' ? 'new' : `state_${message.state}`) }),
      message.from === SYSTEM && h('span', { class: 'tag', text: t('notice') }),
      when(message.createdAt),
    ),
    h('p', { class: 'item-text', dir: 'auto', text: plainText(message) || t('noText') }),
    // A question to another recipient: its options are shown but not clickable.
    !mine && quickReplies(message)?.el,
  );
}

function runRow(run, key) {
  return h(
    'li',
    { class: 'item', data: { key } },
    h(
      'p',
      { class: 'item-head' },
      h('span', { dir: 'auto', text: who(run.agent) }),
      h('span', { class: 'tag', text: t(run.outcome !== 'withdrawn' ? 'runPlan' : run.calls.length ? 'runWithdrawn' : 'answerWithdrawn') }),
      when(run.at),
    ),
    run.text && h('p', { class: 'item-text', dir: 'auto', text: unmarked(run.text) }),
    h('ol', { class: 'runs runs-list' }, runCalls(run).map(callRow)),
  );
}
