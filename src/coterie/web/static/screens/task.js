// One task: its figures, what each agent used, and its messages and turns as a conversation or over time.

import { get } from '../api.js';
import { button, empty, fill, h, setText } from '../dom.js';
import { clockTime, count, dayAndTime, duration, many, money, t } from '../i18n.js';
import { who } from '../message.js';
import { agentPath } from '../router.js';
import { everySecond, isOpenTask, now, on, PERSON, state, textOf, touch, unmarked } from '../state.js';
import { continueTask, costWords, stopButton, taskPath, taskWords } from '../task_line.js';
import { busy, failed, table } from './parts.js';
import { stateTag } from './tasks.js';
import { waterfall } from './waterfall.js';

const REREAD_MS = 700;
const VIEWS = ['talk', 'time', 'agents'];
const DEEPEST = 6;
const MAKE = { talk: conversation, time: waterfall, agents: agentTable };

export function render(root, { args, query }) {
  const id = args[0];
  let head = null;
  const stage = h('div');
  const body = h('div', { class: 'viewer', 'aria-busy': 'true' }, stage);
  let view = VIEWS.find((name) => name === query.get('as')) ?? VIEWS[0];
  let seen = null;
  let drawn = null; // the view that is shown
  let timer = null;
  let gone = false;

  const choose = (name) => {
    view = name;
    history.replaceState(null, '', taskPath(id) + (name === VIEWS[0] ? '' : `?as=${name}`));
    draw();
  };
  const buttons = VIEWS.map((name) => button({ class: 'plain-btn', 'data-testid': `task-${name}`, id: `task-${name}`, text: t(`taskView_${name}`), onclick: () => choose(name) }));
  const switcher = h('div', { class: 'filters', role: 'group', 'aria-label': t('orgView') }, buttons);

  const load = async () => {
    timer = null;
    try {
      const read = await get(`/tasks/${encodeURIComponent(id)}`);
      if (gone) return;
      seen = read;
      const { nodes, ...task } = read;
      state.tasks.set(task.id, task);
      touch('tasks'); // not `task:`, which would read it again
      draw();
    } catch (error) {
      if (gone) return;
      if (!seen) fill(body, error.code === 'unknown_task' ? empty(t('taskUnknown')) : failed(t('notLoaded'), load));
    }
    body.removeAttribute('aria-busy');
  };
  const soon = () => {
    timer ??= setTimeout(load, REREAD_MS);
  };

  const draw = () => {
    buttons.forEach((one, at) => one.setAttribute('aria-pressed', String(VIEWS[at] === view)));
    if (!seen) return;
    if (!head) body.prepend((head = header(seen)).el);
    head.draw(seen);
    if (drawn?.name !== view) {
      drawn?.leave();
      drawn = { name: view, ...MAKE[view]() };
      fill(stage, switcher, drawn.el);
    }
    drawn.draw(seen, new Map([...usedByAgents(seen)].map(([agent, sum]) => [agent, agentWords(sum, seen.currency)])));
  };
  const tick = () => {
    if (seen && isOpenTask(seen) && view === 'time') drawn?.draw();
  };

  fill(root, h('p', {}, h('a', { href: '#/tasks', text: t('tasksAll') })), body);
  load();
  // The address may name any message of the task.
  const changed = (topic) => topic === `task:${seen?.id ?? id}` && soon();
  const stops = [on('task:*', changed), on('snapshot', soon), on('agents', draw), everySecond(tick)];
  return () => {
    gone = true;
    clearTimeout(timer);
    drawn?.leave();
    stops.forEach((stop) => stop());
  };
}

// Figures

/** The head of the view. Its buttons are made once: a dialog returns the focus to the one that opened it. */
function header(task) {
  const other = [task.from, task.to].includes(PERSON) ? task.agent : null;
  const about = h('div', { class: 'viewer-head', tabindex: '-1' });
  const goOn = button({ class: 'primary', 'data-testid': 'task-continue', text: t('continue'), onclick: () => busy(goOn, () => continueTask(task)) });
  const stop = stopButton(task, { class: 'plain-btn danger' });
  const el = h('header', {}, about, h('p', { class: 'item-foot' }, goOn, stop,
    other && h('a', { class: 'text-btn', href: agentPath(other, task.id), text: t('taskConversation') }),
    task.parentTask && h('a', { class: 'text-btn', href: taskPath(task.parentTask), text: t('taskParent') })));
  const draw = (now) => {
    for (const [el, shown] of [[goOn, now.budgetQuestion], [stop, isOpenTask(now)]]) {
      if (!shown && el === document.activeElement) about.focus(); // a hidden element loses the focus to the page
      el.hidden = !shown;
    }
    fill(
      about,
      h('h2', { class: 'clamp', dir: 'auto', text: unmarked(now.text) || t('noText') }),
      h('p', { class: 'item-head', 'data-testid': 'task-state' }, stateTag(now.state), h('span', { dir: 'auto', text: `${who(now.from)} → ${who(now.to)}` }), h('span', { class: 'meta', text: dayAndTime(now.createdAt) })),
      h('p', { class: 'meta', 'data-testid': 'task-words', text: taskWords(now) }),
      h('dl', { class: 'pairs', 'data-testid': 'task-figures' }, figures(now).map(([key, value]) => [h('dt', {}, t(key)), h('dd', {}, value)])),
      now.budgetQuestion && h('p', { class: 'item-text', role: 'status', 'data-testid': 'task-budget', text: t('budgetOpen') }),
    );
  };
  return { el, draw };
}

function figures(task) {
  const { budget = {}, budgets = 1, inputTokens, outputTokens, cachedTokens } = task;
  const limits = [budget.turns && many('turns', budget.turns * budgets), budget.tokens && many('tokens', budget.tokens * budgets),
    budget.cost && money(budget.cost * budgets, task.currency), budget.minutes && t('modelTime', { time: duration(budget.minutes * budgets * 60_000) })].filter(Boolean);
  return [
    ['figureWork', [many('messages', task.messages), many('agents', task.agents), many('turns', task.turns), many('requests', task.requests), many('calls', task.toolCalls)].join(' · ')],
    ['figureTokens', t(cachedTokens ? 'tokensCachedSplit' : 'tokensSplit', { input: count(inputTokens), cached: count(cachedTokens), output: count(outputTokens) })],
    ['figureTime', duration(task.modelMs)],
    ['figureCost', costWords(task) ?? t('costUnknown')],
    ['figureBudget', limits.length ? limits.join(' · ') : t('budgetNone')],
  ];
}

/** What the turns of each agent used: agent -> sums. */
function usedByAgents({ nodes }) {
  const sums = new Map();
  for (const turn of nodes.filter((one) => one.kind === 'turn')) {
    if (!sums.has(turn.agent)) sums.set(turn.agent, { turns: 0, requests: 0, calls: 0, inputTokens: 0, outputTokens: 0, cachedTokens: 0, cost: null, unpricedRequests: 0 });
    const sum = sums.get(turn.agent);
    sum.turns += 1;
    sum.requests += turn.requests.length;
    sum.calls += turn.calls.length;
    for (const key of ['inputTokens', 'outputTokens', 'cachedTokens']) sum[key] += turn[key];
    if (turn.cost !== null) sum.cost = (sum.cost ?? 0) + turn.cost;
    sum.unpricedRequests += turn.requests.filter((one) => one.cost === null).length;
  }
  return sums;
}

const agentWords = (sum, currency) => [many('tokens', sum.inputTokens + sum.outputTokens), costWords({ ...sum, currency })].filter(Boolean).join(' · ');

function agentTable() {
  const el = h('div');
  const columns = [['figureTurns', 'turns'], ['figureRequests', 'requests'], ['figureCalls', 'calls'], ['tokensIn', 'inputTokens'], ['tokensCached', 'cachedTokens'], ['tokensOut', 'outputTokens']];
  const row = (task) => ([agent, sum]) => [who(agent), ...columns.map(([, name]) => count(sum[name])), costWords({ ...sum, currency: task.currency }) ?? t('unknown')];
  const draw = (task) => fill(el, table('task-agents', [t('timelineAgent'), ...columns.map(([key]) => t(key)), t('figureCost')], [...usedByAgents(task)].map(row(task))));
  return { el, draw, leave() {} };
}

// The conversation: each message under the one that caused it

function conversation() {
  const el = h('ol', { class: 'items talk', 'aria-label': t('taskView_talk'), 'data-testid': 'task-tree' });
  const rows = new Map(); // id -> {key, el}
  const draw = (task) => {
    const all = inOrder(task.nodes);
    const ids = new Set(all.map(([{ id }]) => id));
    for (const [id, row] of rows) if (!ids.has(id) && rows.delete(id)) row.el.remove();
    all.forEach(([node, level], at) => {
      const key = JSON.stringify([node, level, who(node.from ?? node.agent), who(node.to), node.text && wordsOf(node)]);
      const live = node.kind === 'turn' && !node.endedAt;
      let row = rows.get(node.id);
      if (row?.key !== key || live) {
        const made = { key, el: node.kind === 'turn' ? turnRow(node, level, task.currency) : messageRow(node, level) };
        row?.el.replaceWith(made.el);
        rows.set(node.id, (row = made));
      }
      // Rows that stay are not moved: selected text stays selected.
      if (el.children[at] !== row.el) el.insertBefore(row.el, el.children[at] ?? null);
    });
  };
  return { el, draw, leave() {} };
}

/** Each node after the one that caused it, with its level. A turn and what it sent have the same parent. */
function inOrder(nodes) {
  const ids = new Set(nodes.map((one) => one.id));
  const under = new Map();
  for (const node of nodes) {
    const parent = ids.has(node.parent) ? node.parent : null;
    if (!under.has(parent)) under.set(parent, []);
    under.get(parent).push(node);
  }
  const all = [];
  const waiting = [...(under.get(null) ?? [])].reverse().map((node) => [node, 1]);
  while (waiting.length) {
    const [node, level] = waiting.pop();
    all.push([node, level]);
    waiting.push(...[...(under.get(node.id) ?? [])].reverse().map((child) => [child, level + 1]));
  }
  return all;
}

const levelAttributes = (level) => ({ 'aria-level': String(level), data: { level: String(level) } });

/** The text of a message in the page's language, as far as it is known; without Markdown. */
function wordsOf(node) {
  const known = state.messages.get(node.id);
  const text = known && textOf(known);
  return unmarked(known && text !== known.payload?.text ? text : node.text); // a text as it was written may be long
}

function messageRow(node, level) {
  const waits = node.state !== 'taken' && node.to !== PERSON;
  return h(
    'li',
    { class: `item level-${Math.min(level, DEEPEST)}`, ...levelAttributes(level), 'data-testid': 'task-message' },
    h('p', { class: 'item-head' }, h('span', { dir: 'auto', text: `${who(node.from)} → ${who(node.to)}` }),
      node.question && h('span', { class: 'tag', text: t(!node.answer ? 'questionOpen' : node.answer.closed ? 'questionClosed' : 'questionAnswered') }),
      waits && h('span', { class: `tag ${node.state}`, text: t(`state_${node.state}`) }),
      h('time', { class: 'meta', datetime: node.createdAt, text: clockTime(node.createdAt) })),
    h('p', { class: 'item-text', dir: 'auto', text: wordsOf(node) || t('noText') }),
    node.question && !node.answer && node.to === PERSON && h('a', { class: 'text-btn', href: agentPath(node.from, node.id), 'data-testid': 'task-answer', text: t('taskAnswer') }),
  );
}

function turnRow(turn, level, currency) {
  const ms = Date.parse(turn.endedAt ?? new Date(now()).toISOString()) - Date.parse(turn.startedAt);
  const tokens = turn.inputTokens + turn.outputTokens;
  const cost = costWords({ cost: turn.cost, currency, unpricedRequests: turn.requests.filter((one) => one.cost === null).length });
  const words = [t(`turn_${turn.state}`, { time: duration(ms) }), turn.requests.length > 0 && many('requests', turn.requests.length), tokens > 0 && many('tokens', tokens), cost,
    turn.calls.map((call) => [call.name, t(`run_${call.state}`)].join(' ')).join(', ')].filter(Boolean);
  const el = h('li', { class: `meta turn level-${Math.min(level, DEEPEST)}`, ...levelAttributes(level), 'data-testid': 'task-turn' }, h('b', { dir: 'auto', text: who(turn.agent) }), h('span'));
  setText(el.lastChild, ` ${words.join(' · ')}`);
  return el;
}
