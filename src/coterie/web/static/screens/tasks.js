// Tasks: at work, waiting for the person, ended. Filters are part of the address. One task and the usage have their own views.

import { query } from '../api.js';
import { button, empty, fill, h, keepFocus, like, setText, sync } from '../dom.js';
import { many, roughly, t } from '../i18n.js';
import { who } from '../message.js';
import { isOpenTask, on, openTasks, state, unmarked } from '../state.js';
import { stopButton, taskPath, taskWords } from '../task_line.js';
import { choice, failed, field, section, when } from './parts.js';

const REDRAW_MS = 250;
const STATES = ['working', 'waiting', 'done', 'failed', 'stopped'];
const GROUPS = [['working', 'tasksWorking'], ['waiting', 'tasksWaiting'], ['ended', 'tasksEnded']];

export function render(root, at) {
  const path = at.args[0];
  const views = at.query.get('view') === 'usage' ? import('./usage.js') : path ? import('./task.js') : null;
  if (!views) return listing(root, at.query);
  let leave = null;
  let gone = false;
  views.then(
    (view) => {
      if (!gone) leave = view.render(root, at);
    },
    () => fill(root, failed(t('scriptMissed'), () => location.reload())),
  );
  return () => {
    gone = true;
    leave?.();
  };
}

/** Links to the two views of this screen. */
export const views = (shown) =>
  h('div', { class: 'filters', role: 'group', 'aria-label': t('orgView') }, [['list', '#/tasks', t('tasks')], ['usage', '#/tasks?view=usage', t('usage')]].map(([name, href, text]) =>
    h('a', { class: 'plain-btn link-btn', href, 'aria-current': name === shown ? 'page' : null, 'data-testid': `tasks-${name}`, text })));

const LOOKS = { working: 'delayed', waiting: 'queued', done: 'ok', failed: 'bad' };

export const stateTag = (name) => h('span', { class: `tag ${LOOKS[name] ?? ''}`, text: t(`taskState_${name}`) });

function listing(root, asked) {
  const filters = { state: STATES.includes(asked.get('state')) ? asked.get('state') : '', agent: asked.get('agent') ?? '' };
  const found = new Map(); // id -> task, of the loaded pages
  const body = h('div');
  const foot = h('div');
  let next;
  let turn = 0;

  const agent = choice([], '', (value) => change({ agent: value }));
  const listAgents = () => {
    const all = [...state.agents.values()].filter((one) => one.kind !== 'person').map((one) => [one.id, one.name]);
    fill(agent, [['', t('allAgents')], ...all].map(([value, text]) => h('option', { value, text })));
    agent.value = filters.agent;
  };
  const kind = choice([['', t('tasksAny')], ...STATES.map((name) => [name, t(`taskState_${name}`)])], filters.state, (value) => change({ state: value }));

  const change = (wanted) => {
    Object.assign(filters, wanted);
    const set = new URLSearchParams(Object.entries(filters).filter(([, value]) => value));
    history.replaceState(null, '', set.size ? `#/tasks?${set}` : '#/tasks');
    found.clear();
    again();
  };
  const again = () => {
    turn += 1;
    next = undefined;
    load();
  };
  const load = async () => {
    const mine = turn;
    if (next === undefined) fill(foot, h('p', { class: 'meta', text: t('loading') }));
    try {
      const page = await query('/tasks', { ...filters, cursor: next, limit: 50 });
      if (mine !== turn) return;
      if (next === undefined) found.clear();
      for (const task of page.items) found.set(task.id, task);
      next = page.next;
      draw();
    } catch {
      if (mine === turn) fill(foot, failed(t('notLoaded'), load));
    }
  };

  /** Tasks of the loaded pages as they are now, and open ones that match the filter. */
  const current = () => {
    const live = openTasks().filter((one) => !filters.agent || one.agent === filters.agent || one.activeAgents.includes(filters.agent));
    for (const task of live) found.set(task.id, task);
    const all = [...found.values()].map((one) => state.tasks.get(one.id) ?? one);
    return all.filter((one) => !filters.state || one.state === filters.state).sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1));
  };
  const groups = GROUPS.map(([name, title]) => {
    const list = h('ul', { class: 'items', 'aria-labelledby': `tasks-${name}` });
    return { name, title, list, el: section(`tasks-${name}`, '', list) };
  });
  fill(body, groups.map(({ el }) => el));
  const rows = new Map(); // kept, also in another group: a dialog returns the focus to the button that opened it
  const rowOf = (task) => {
    rows.set(task.id, like(rows.get(task.id), row(task)));
    return rows.get(task.id);
  };
  const draw = () => {
    const all = current();
    keepFocus(body, () => groups.forEach(({ name, title, list, el }) => {
      const items = all.filter((one) => (name === 'ended' ? !isOpenTask(one) : one.state === name));
      el.hidden = !items.length;
      setText(el.firstChild, t(title, { n: items.length }));
      sync(list, items.map(rowOf));
    }));
    sync(foot, next ? button({ class: 'plain-btn', text: t('older'), onclick: load }) : next === null && !all.length && empty(t(filters.state || filters.agent ? 'timelineNone' : 'tasksNone')));
  };

  fill(root, views('list'), h('div', { class: 'filters' }, field(t('tasksState'), kind), field(t('timelineAgent'), agent)), body, foot);
  listAgents();
  again();
  let timer = null;
  const soon = () => {
    timer ??= setTimeout(() => {
      timer = null;
      draw();
    }, REDRAW_MS);
  };
  const stops = [on('tasks', soon), on('snapshot', again), on('agents', () => {
    listAgents();
    draw();
  })];
  return () => {
    turn += 1;
    clearTimeout(timer);
    stops.forEach((stop) => stop());
  };
}

function row(task) {
  const tokens = task.inputTokens + task.outputTokens;
  return h(
    'li',
    { class: 'item', data: { task: task.id, key: task.id }, 'data-testid': 'task' },
    h(
      'a',
      { class: 'item-link', href: taskPath(task.id) },
      h('span', { class: 'item-head' }, stateTag(task.state), h('span', { dir: 'auto', text: `${who(task.from)} → ${who(task.to)}` }), when(task.createdAt)),
      h('span', { class: 'item-text clamp', dir: 'auto', text: unmarked(task.text) || t('noText') }),
    ),
    h('p', { class: 'item-foot' }, h('span', { class: 'meta', text: [taskWords(task), tokens > 0 && many('tokens', tokens, roughly(tokens))].filter(Boolean).join(' · ') }),
      isOpenTask(task) && stopButton(task)),
  );
}
