// The list of agents: a tree by who made whom, with state, unread count and the tail of what each one is saying.

import { fill, h, icon, iconButton, setText } from './dom.js';
import { t } from './i18n.js';
import { agentPath, go, place } from './router.js';
import { on, openQuestions, plainText, state, unreadTotal, watchers } from './state.js';
import { doing, dot, stop, stopping } from './header.js';

const TAIL_MS = 250;
const TAIL = 15; // full-width characters
const folded = new Set();

export function mountAgents(root) {
  const rows = new Map(); // id -> {el, paint}
  let words = '';
  let typed = '';
  let typedAt = 0;

  const filter = h('input', { class: 'field', type: 'search', placeholder: t('filter'), 'aria-label': t('filter'), 'data-testid': 'agent-filter',
    oninput: () => {
      words = filter.value.trim().toLowerCase();
      build();
    } });
  const links = h('ul', { class: 'side-links' });
  const tree = h('ul', { class: 'tree', role: 'tree', 'aria-label': t('regionAgents'), 'data-testid': 'agents', onkeydown: keys });
  const empty = h('p', { class: 'meta side-empty', hidden: true });
  fill(root, h('div', { class: 'side-top' }, filter), links, h('div', { class: 'tree-box' }, tree, empty));

  function build() {
    const agents = [...state.agents.values()];
    const match = (one) => !words || `${one.name} ${one.id}`.toLowerCase().includes(words);
    const children = new Map();
    for (const one of agents) {
      const parent = state.agents.has(one.parent) && !words ? one.parent : null;
      if (!children.has(parent)) children.set(parent, []);
      if (match(one)) children.get(parent).push(one);
    }
    const order = (a, b) => (a.state === 'terminated') - (b.state === 'terminated') || a.name.localeCompare(b.name, undefined, { numeric: true });
    const focused = document.activeElement?.closest?.('[data-agent-row]')?.dataset.agentRow;
    rows.clear();
    const items = [];
    const add = (parent, level) => {
      const list = (children.get(parent) ?? []).sort(order);
      list.forEach((one, at) => {
        const kids = (children.get(one.id) ?? []).length;
        items.push(row(one, level, at, list.length, kids));
        if (kids && !folded.has(one.id)) add(one.id, level + 1);
      });
    };
    add(null, 1);
    fill(tree, items);
    tree.classList.toggle('is-flat', !tree.querySelector('[aria-expanded]'));
    empty.hidden = items.length > 0;
    setText(empty, agents.length ? t('noMatch') : state.booted ? t('noAgents') : '');
    rove(focused ?? place().args[0]);
    if (focused) rows.get(focused)?.el.focus();
  }

  function row(one, level, at, size, kids) {
    const name = h('span', { class: 'row-name' });
    const mark = h('span', { class: 'row-marks' });
    const sub = h('span', { class: 'row-sub' });
    const word = h('span', { class: 'vh' });
    const dots = h('span', { class: 'row-dot' });
    const stopper = iconButton('stop', t('stopAgent', { name: one.name }), { class: 'row-stop', tabindex: '-1', 'data-testid': 'row-stop', onclick: (event) => {
      event.stopPropagation();
      stop(one.id);
    } });
    const fold = kids ? h('span', { class: 'row-fold', 'aria-hidden': 'true', onclick: (event) => {
      event.stopPropagation();
      toggle(one.id);
    } }, '▾') : null;
    const el = h('li', { class: `row level-${Math.min(level, 6)}`, role: 'treeitem', tabindex: '-1', 'aria-level': String(level), 'aria-posinset': String(at + 1),
      'aria-setsize': String(size), 'aria-expanded': kids ? String(!folded.has(one.id)) : null, data: { agentRow: one.id }, 'data-testid': `agent-${one.id}`,
      onclick: () => go(agentPath(one.id)) },
    h('span', { class: 'row-line' }, fold ?? h('span', { class: 'row-fold' }), dots, name, word, mark, stopper), sub);

    function paint() {
      const agent = state.agents.get(one.id) ?? one;
      const known = state.threads.get(one.id);
      const asks = openQuestions(one.id).length > 0 && agent.state !== 'terminated';
      const unread = known?.unread ?? 0;
      setText(name, agent.name || agent.id);
      fill(dots, dot(agent));
      el.className = `row level-${Math.min(level, 6)} is-${agent.state}`;
      const current = place().name !== '' ? place().name === 'a' && place().args[0] === one.id : state.home === one.id;
      el.setAttribute('aria-selected', String(current));
      setText(word, [agent.state === 'active' ? doing(agent) : t(agent.state), unread && t('unread', { n: unread }), asks && t('waitsForYou')].filter(Boolean).map((part) => `, ${part}`).join(''));
      fill(mark, asks && h('span', { class: 'row-star', 'aria-hidden': 'true', title: t('waitsForYou') }, '★'),
        unread > 0 && h('span', { class: 'badge', 'aria-hidden': 'true', 'data-testid': 'unread' }, unread > 99 ? '99+' : String(unread)));
      stopper.hidden = agent.state !== 'active' || stopping.has(one.id);
      paintSub(agent, known);
    }

    function paintSub(agent, known) {
      const draft = [...state.drafts.values()].find((each) => each.agent === one.id && !each.stopped && !each.ended);
      if (draft?.text) setText(sub, `…${tailOf(draft.text)}`);
      else if (agent.state === 'active') setText(sub, doing(agent));
      else if (agent.state !== 'idle') setText(sub, t(agent.state));
      else setText(sub, known?.last ? plainText(known.last).slice(0, 80) : t('idle'));
    }

    let late = null;
    const tail = () => {
      late ??= setTimeout(() => {
        late = null;
        if (el.isConnected) paintSub(state.agents.get(one.id) ?? one, state.threads.get(one.id));
      }, TAIL_MS);
    };
    rows.set(one.id, { el, paint, tail });
    paint();
    return el;
  }

  function toggle(id) {
    if (!folded.delete(id)) folded.add(id);
    build();
  }

  // One stop for Tab; arrows move inside.

  function rove(id) {
    const to = rows.get(id) ?? rows.values().next().value;
    for (const { el } of rows.values()) el.tabIndex = -1;
    if (to) to.el.tabIndex = 0;
    return to;
  }

  function keys(event) {
    const el = event.target.closest('[data-agent-row]');
    if (!el || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...rows.values()].map((one) => one.el);
    const at = all.indexOf(el);
    const id = el.dataset.agentRow;
    const to = { ArrowDown: all[at + 1], ArrowUp: all[at - 1], Home: all[0], End: all.at(-1) }[event.key];
    if (to) rove(to.dataset.agentRow).el.focus();
    else if (event.key === 'Enter' || event.key === ' ') go(agentPath(id));
    else if (event.key === 'ArrowRight' && el.getAttribute('aria-expanded') === 'false') toggle(id);
    else if (event.key === 'ArrowRight' && el.getAttribute('aria-expanded') === 'true') rove(all[at + 1]?.dataset.agentRow)?.el.focus();
    else if (event.key === 'ArrowLeft' && el.getAttribute('aria-expanded') === 'true') toggle(id);
    else if (event.key === 'ArrowLeft') rows.get(state.agents.get(id)?.parent) && rove(state.agents.get(id).parent).el.focus();
    else if (event.key.length === 1 && event.key !== '?') seek(event.key, all, at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function seek(key, all, at) {
    typed = performance.now() - typedAt < 700 ? typed + key.toLowerCase() : key.toLowerCase();
    typedAt = performance.now();
    const from = typed.length > 1 ? at : at + 1;
    const found = [...all.slice(from), ...all.slice(0, from)].find((el) => state.agents.get(el.dataset.agentRow)?.name.toLowerCase().startsWith(typed));
    if (found) rove(found.dataset.agentRow).el.focus();
  }

  function paintLinks() {
    const asks = openQuestions().filter((one) => state.agents.get(one.from)?.state !== 'terminated').length;
    const link = (name, iconName, label, count, soft) =>
      h('li', {}, h('a', { class: 'side-link', href: `#/${name}`, 'aria-current': place().name === name.split('?')[0] && !soft ? 'page' : null, 'data-testid': `link-${name.replace(/\W.*/, soft ? '-asks' : '')}` },
        icon(iconName), h('span', { class: 'row-name' }, label), count ? h('span', { class: `badge num ${soft ? 'badge-soft' : ''}` }, count > 99 ? '99+' : String(count)) : null));
    fill(links,
      asks > 0 && link('inbox?only=questions', 'star', t('waitingForYou'), asks, true),
      link('inbox', 'inbox', t('inbox'), unreadTotal()),
      link('timeline', 'list', t('timeline')),
      h('li', { class: 'only-small' }, link('delayed', 'clock', t('delayed'), state.delayed.size).firstChild),
      h('li', { class: 'only-small' }, link('artifacts', 'box', t('artifacts')).firstChild),
      h('li', { class: 'only-small' }, link('org', 'tree', t('org')).firstChild));
  }

  const watch = (kind, data) => {
    if (kind.startsWith('draft.')) rows.get(data.agent)?.tail();
  };
  const paintAll = () => rows.forEach((one) => one.paint());
  const paintOne = (topic) => rows.get(topic.slice(topic.indexOf(':') + 1))?.paint();
  const ends = [
    on(['agents', 'snapshot'], build),
    on(['questions', 'unread', 'threads'], paintAll),
    on(['questions', 'unread', 'delayed', 'snapshot'], paintLinks),
    on('agent:*', paintOne),
    () => watchers.delete(watch),
  ];
  watchers.add(watch);
  const onScreen = () => {
    paintAll();
    paintLinks();
    rove(place().args[0]);
  };
  document.addEventListener('screen', onScreen);
  build();
  paintLinks();
  return () => {
    document.removeEventListener('screen', onScreen);
    ends.forEach((end) => end());
  };
}

const event_time = () => performance.now();

/** The end of a text, as much as fits a row. */
function tailOf(text) {
  const signs = [...text.slice(-80).replace(/\s+/g, ' ')];
  let width = 0;
  let at = signs.length;
  while (at > 0 && width < TAIL) width += signs[--at].codePointAt(0) > 0x2e7f ? 1 : 0.55;
  return signs.slice(at).join('');
}
