// The list of agents: a tree by parent, with state, unread count and the end of each reply in progress.

import { post } from './api.js';
import { avatar, fill, h, icon, iconButton, reveal, setAttr, setText } from './dom.js';
import { t } from './i18n.js';
import { oops } from './notices.js';
import { agentPath, go, route } from './router.js';
import { addressed, called, plainText, on, openQuestions, openTasks, PERSON, progressOf, state, touch, unmarked, unreadTotal, untilNext, upTo99, watchers } from './state.js';

const TAIL_MS = 250;
const TAIL = 15; // full-width characters
const PART = 400; // characters of a draft, with the addresses of links
const TYPED_MS = 700;
const folded = new Set();

// Status of one agent

/** Agents that were told to stop, as they are in `state.agents`: each event about an agent replaces it there, and so ends this. */
export const stopping = new WeakSet();

/** The agent's status in a few words. */
export function doing(agent) {
  if (agent.retired) return t('change_retired');
  if (agent.state !== 'active') return t(agent.state);
  if (stopping.has(agent)) return t('stopping');
  if (agent.phase === 'tool' && agent.tool) return agent.tool;
  const says = agent.phase === 'thinking' && [...state.drafts.values()].some((one) => one.agent === agent.id && !one.stopped && !one.ended);
  return t(says ? 'phase_replying' : `phase_${agent.phase ?? 'thinking'}`);
}

export async function stop(id) {
  const agent = state.agents.get(id);
  if (agent?.state !== 'active' || stopping.has(agent)) return;
  stopping.add(agent);
  touch(`agent:${id}`);
  try {
    await post(`/agents/${encodeURIComponent(id)}/stop`);
  } catch (error) {
    stopping.delete(agent);
    touch(`agent:${id}`);
    oops(error, () => stop(id));
  }
}

export const dot = (agent) => h('span', { class: `dot dot-${agent.state}`, 'aria-hidden': 'true' });

// Trees of agents, also used by the organisation screen

/** Agents grouped by parent; an agent whose parent is unknown is a root. */
export function family() {
  const gone = (one) => Number(one.state === 'terminated' || Boolean(one.retired));
  const order = (a, b) => gone(a) - gone(b) || (a.position ?? Infinity) - (b.position ?? Infinity) || a.name.localeCompare(b.name, undefined, { numeric: true });
  const all = [...state.agents.values()].filter((one) => one.kind !== 'person').sort(order);
  const nodes = new Map(all.map((agent) => [agent.id, { agent, kids: [] }]));
  const roots = [];
  for (const node of nodes.values()) (nodes.get(node.agent.parent)?.kids ?? roots).push(node);
  return roots;
}

/** The visible rows, from top to bottom. */
export const flat = (nodes, shut, level = 1) =>
  nodes.flatMap((node, at) => [{ ...node, level, at, of: nodes.length }, ...(shut.has(node.agent.id) ? [] : flat(node.kids, shut, level + 1))]);

/** ARIA attributes of a tree item. */
export const treeItem = ({ agent, kids, level, at, of }, shut) => ({ role: 'treeitem', tabindex: '-1', 'aria-level': String(level), 'aria-posinset': String(at + 1),
  'aria-setsize': String(of), 'aria-expanded': kids.length ? String(!shut.has(agent.id)) : null, data: { agent: agent.id, key: agent.id }, onclick: () => go(agentPath(agent.id)) });

let typed = '';
let typedAt = 0;
let moving = null; // the item that an arrow key or a letter has reached

/** Keyboard control: Tab reaches one item, arrows move; then letters search. Uses `focus(id)` and `toggle(id)`. */
export function treeKeys(event, focus, toggle) {
  const { key } = event;
  const el = event.target.closest('[role=treeitem]');
  if (!el || event.altKey || event.ctrlKey || event.metaKey || key === '?') return;
  const all = [...event.currentTarget.children];
  const at = all.indexOf(el);
  const open = { true: true, false: false }[el.ariaExpanded];
  const id = el.dataset.agent;
  const above = () => all.slice(0, at).findLast((one) => Number(one.ariaLevel) < Number(el.ariaLevel));
  if (key === 'Enter' || key === ' ') go(agentPath(id));
  else if (key === (open ? 'ArrowLeft' : 'ArrowRight') && open !== undefined) toggle(id);
  else {
    const to = { ArrowDown: all[at + 1], ArrowUp: all[at - 1], Home: all[0], End: all.at(-1), ArrowRight: open && all[at + 1], ArrowLeft: above() }[key]
      ?? (key.length === 1 && moving === id ? seek(key, all, at) : null);
    if (!to && !key.startsWith('Arrow')) return;
    if (to) focus(to.dataset.agent);
    moving = (to || el).dataset.agent;
  }
  event.preventDefault();
  event.stopPropagation();
}

function seek(key, all, at) {
  const now = performance.now();
  typed = (now - typedAt < TYPED_MS ? typed : '') + key.toLowerCase();
  typedAt = now;
  const from = typed.length > 1 ? at : at + 1;
  return [...all.slice(from), ...all.slice(0, from)].find((el) => state.agents.get(el.dataset.agent)?.name.toLowerCase().startsWith(typed));
}

export function mountAgents(root) {
  const rows = new Map(); // id -> {el, paint}
  let words = '';

  const filter = h('input', { class: 'field', type: 'search', placeholder: t('filter'), 'aria-label': t('filter'), 'data-testid': 'agent-filter',
    oninput: () => {
      words = filter.value.trim().toLowerCase();
      build();
    } });
  const links = h('ul', { class: 'side-links' });
  const tree = h('ul', { class: 'tree', role: 'tree', 'aria-label': t('regionAgents'), 'data-testid': 'agents', onkeydown: (event) => treeKeys(event, focus, toggle) });
  const empty = h('p', { class: 'meta side-empty', hidden: true });
  const box = h('div', { class: 'tree-box' }, tree, empty);
  fill(root, h('div', { class: 'side-top' }, filter, h('a', { class: 'icon-btn', href: '#/agents/new', 'aria-label': t('agentsNew'), title: t('agentsNew'), 'data-testid': 'new-agent' }, icon('plus'))), links, box);

  function build() {
    const all = flat(family(), words ? new Set() : folded);
    const shown = words ? all.filter(({ agent }) => called(agent).includes(words)).map((one) => ({ ...one, level: 1, kids: [] })) : all;
    const first = !rows.size;
    rows.clear();
    fill(tree, shown.map(row));
    if (first) toCurrent();
    tree.classList.toggle('is-flat', !shown.some((one) => one.kids.length));
    empty.hidden = shown.length > 0;
    setText(empty, all.length ? t('noMatch') : state.booted ? t('noAgents') : '');
    rove(document.activeElement.closest('.tree [data-agent]')?.dataset.agent ?? route().args[0]);
  }

  function row(node) {
    const one = node.agent;
    const name = h('span', { class: 'row-name' });
    const mark = h('span', { class: 'row-marks' });
    const sub = h('span', { class: 'row-sub' });
    const word = h('span', { class: 'vh' });
    const dots = h('span', { class: 'row-dot' });
    const stopper = iconButton('stop', t('stopAgent', { name: one.name }), { class: 'row-stop', tabindex: '-1', 'data-testid': 'row-stop', onclick: (event) => {
      event.stopPropagation();
      stop(one.id);
    } });
    const fold = h('span', { class: 'row-fold', 'aria-hidden': 'true', onclick: (event) => {
      if (!node.kids.length) return;
      event.stopPropagation();
      toggle(one.id);
    } }, node.kids.length > 0 && '▾');
    const el = h('li', { ...treeItem(node, folded), 'data-testid': `agent-${one.id}` }, fold, dots,
      h('span', { class: 'row-words' }, h('span', { class: 'row-line' }, name, word, mark, stopper), sub));
    let painted = '';

    function paint() {
      const agent = state.agents.get(one.id) ?? one;
      const known = state.threads.get(one.id);
      const asks = openQuestions(one.id).length > 0 && agent.state !== 'terminated';
      const unread = known?.unread ?? 0;
      const current = addressed() === one.id;
      const says = [doing(agent), unread && t('unread', { n: unread }), asks && t('waitsForYou')].filter(Boolean).map((part) => `, ${part}`).join('');
      const key = [agent.name, agent.retired, agent.description, agent.state, says, current, stopping.has(agent)].join();
      paintSub(agent, known);
      if (key === painted) return;
      painted = key;
      setText(name, agent.name || agent.id);
      setText(word, says);
      fill(dots, avatar(agent, { sign: dot(agent) }));
      el.className = `row level-${Math.min(node.level, 6)} is-${agent.retired ? 'terminated' : agent.state}`;
      setAttr(el, 'aria-selected', String(current));
      setAttr(el, 'title', agent.description || null);
      fill(mark, asks && h('span', { class: 'row-star', 'aria-hidden': 'true', title: t('waitsForYou') }, '★'),
        unread > 0 && h('span', { class: 'badge', 'aria-hidden': 'true', 'data-testid': 'unread' }, upTo99(unread)));
      stopper.hidden = agent.state !== 'active' || stopping.has(agent);
    }

    function paintSub(agent, known) {
      const draft = [...state.drafts.values()].find((each) => each.agent === one.id && !each.stopped && !each.ended);
      if (draft?.text) setText(sub, `…${tailOf(draft.text, TAIL - node.level)}`);
      else if (agent.state !== 'idle') setText(sub, [doing(agent), progressOf(one.id)].filter(Boolean).join(' · '));
      else setText(sub, lastLine(known?.last) || agent.role || agent.description || t(agent.remote ? 'agentRemote' : 'idle'));
    }

    let late = null;
    const tail = () => {
      late ??= setTimeout(() => {
        late = null;
        if (el.isConnected) paintSub(state.agents.get(one.id) ?? one, state.threads.get(one.id));
      }, untilNext(TAIL_MS));
    };
    rows.set(one.id, { el, paint, tail });
    paint();
    return el;
  }

  function toggle(id) {
    if (!folded.delete(id)) folded.add(id);
    build();
  }

  function toCurrent() {
    const current = rows.get(addressed());
    if (current) reveal(current.el, box);
  }

  function rove(id) {
    const to = rows.get(id) ?? rows.values().next().value;
    for (const { el } of rows.values()) el.tabIndex = -1;
    if (to) to.el.tabIndex = 0;
    return to;
  }

  const focus = (id) => rove(id)?.el.focus();

  let shownCount = 0; // open tasks
  const openCount = () => openTasks().length + state.moreTasks;

  function paintLinks() {
    const asks = openQuestions().filter((one) => state.agents.get(one.from)?.state !== 'terminated').length;
    const link = (name, sign, count, where, part = '', label = t(name)) =>
      h('li', { class: where }, h('a', { class: 'side-link', href: `#/${name}${part}`, 'aria-current': route().name === name && !part ? 'page' : null, 'data-testid': `link-${name}${part && '-asks'}` },
        icon(sign), h('span', { class: 'row-name' }, label), count > 0 && h('span', { class: `badge num ${name === 'inbox' && !part ? '' : 'badge-soft'}` }, upTo99(count))));
    fill(links,
      link('inbox', 'star', asks, null, '?only=questions', t('waitingForYou')), // always there, so that nothing moves
      link('inbox', 'inbox', unreadTotal()),
      link('tasks', 'tasks', (shownCount = openCount())),
      link('timeline', 'list'),
      link('agents', 'people'),
      link('delayed', 'clock', state.delayed.size),
      link('artifacts', 'box'),
      link('org', 'tree'));
  }

  const watch = (kind, data) => {
    if (kind.startsWith('draft.') || kind === 'tool.progress') rows.get(data.agent)?.tail();
  };
  const paintAll = () => rows.forEach((one) => one.paint());
  const paintOne = (topic) => rows.get(topic.slice(topic.indexOf(':') + 1))?.paint();
  const ends = [
    on(['agents', 'snapshot'], build),
    on(['questions', 'unread', 'threads'], paintAll),
    on(['questions', 'unread', 'delayed', 'snapshot'], paintLinks),
    on('tasks', () => openCount() !== shownCount && paintLinks()),
    on('agent:*', paintOne),
    () => watchers.delete(watch),
  ];
  watchers.add(watch);
  const onScreen = () => {
    paintAll();
    paintLinks();
    toCurrent();
    rove(route().args[0]);
  };
  document.addEventListener('screen', onScreen);
  build();
  paintLinks();
  return () => {
    document.removeEventListener('screen', onScreen);
    ends.forEach((end) => end());
  };
}

/** The newest message in one line, as in "You: yes". */
function lastLine(last) {
  if (!last) return '';
  const text = plainText(last).slice(0, 80) || (last.stopped ? t('replyStoppedEarly') : t('attachments'));
  return last.from === PERSON ? t('said', { name: t('you'), text }) : text;
}

/** The end of a text that fits one row, without Markdown syntax. */
function tailOf(text, most) {
  const signs = [...unmarked(text.slice(-PART)).slice(-80)];
  let width = 0;
  let at = signs.length;
  while (at > 0 && width < most) width += signs[--at].codePointAt(0) > 0x2e7f ? 1 : 0.55;
  return signs.slice(at).join('');
}
