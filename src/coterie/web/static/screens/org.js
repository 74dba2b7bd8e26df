// The organisation: agents by parent, as a tree or as a drawing.

import { button, empty, fill, h, icon, s } from '../dom.js';
import { t } from '../i18n.js';
import { doing, dot, family, flat, treeItem, treeKeys } from '../agents_list.js';
import { agentPath } from '../router.js';
import { on, takes } from '../state.js';
import './parts.js'; // loads the style sheet of all screens

const SHOWN = 'coterie.org';

export function render(root, { compact }) {
  const stage = h('div', { class: 'org' });
  const folded = new Set();
  let graph = !compact && localStorage.getItem(SHOWN) === 'graph';
  let current = null;

  const views = [['tree', false], ['graph', true]].map(([name, value]) =>
    button({ class: 'plain-btn', 'aria-pressed': String(graph === value), text: t(`org_${name}`), onclick: () => choose(value) }),
  );
  const choose = (value) => {
    graph = value;
    localStorage.setItem(SHOWN, graph ? 'graph' : 'tree');
    views.forEach((one, i) => one.setAttribute('aria-pressed', String(Boolean(i) === graph)));
    draw();
  };
  const draw = () => {
    const roots = family();
    if (!roots.length) return fill(stage, empty(t('noAgents')));
    if (graph) return drawGraph(stage, roots);
    const shown = flat(roots, folded);
    if (!shown.some(({ agent }) => agent.id === current)) current = shown[0].agent.id;
    fill(stage, h('ul', { class: 'org-tree', role: 'tree', 'aria-label': t('org'), onkeydown: (event) => treeKeys(event, focus, fold) }, shown.map(row)));
    mark();
  };
  const row = (node) => {
    const { agent, kids, level } = node;
    const sign = kids.length && (folded.has(agent.id) ? '▸' : '▾');
    const turn = (event) => {
      event.stopPropagation();
      fold(agent.id);
    };
    return h(
      'li',
      { class: `org-row org-level-${Math.min(level, 8)}`, ...treeItem(node, folded) },
      h('span', { class: 'fold', 'aria-hidden': 'true', onclick: sign ? turn : null }, sign || null),
      dot(agent),
      h('span', { class: 'org-name', dir: 'auto', text: agent.name }),
      h('span', { class: 'meta', text: doing(agent) }),
      agent.waiting > 0 && h('span', { class: 'tag queued', text: t('orgWaiting', { n: agent.waiting }) }),
      agent.delayed > 0 && h('span', { class: 'tag', text: t('orgDelayed', { n: agent.delayed }) }),
      capabilities(agent),
      agent.description && h('span', { class: 'org-about meta', dir: 'auto', 'data-testid': 'about', text: agent.description }),
    );
  };
  const mark = () => {
    for (const el of stage.querySelectorAll('[role=treeitem]')) {
      el.tabIndex = el.dataset.agent === current ? 0 : -1;
      el.setAttribute('aria-selected', String(!el.tabIndex));
    }
  };
  const focus = (id) => {
    current = id;
    mark();
    stage.querySelector('[tabindex="0"]')?.focus();
  };
  const fold = (id) => {
    if (!folded.delete(id)) folded.add(id);
    draw();
  };

  fill(root, !compact && h('div', { class: 'filters', role: 'group', 'aria-label': t('orgView') }, views), stage);
  draw();
  let planned = false;
  const soon = () => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      if (stage.isConnected) draw();
    });
  };
  return on(['agents', 'snapshot', 'agent:*'], soon);
}

function capabilities(agent) {
  const reads = takes(agent);
  const label = [t('takesIn'), ...reads.map((name) => t(`cap_${name}`))].join(', ');
  return h('span', { class: 'org-caps', role: 'img', 'aria-label': label, title: label }, reads.map(icon));
}

// The drawing: parents above, leaves side by side. Every node is a link to its conversation.

const [WIDE, HIGH, GAP] = [148, 120, 24];

function drawGraph(stage, roots) {
  const placed = [];
  const lines = [];
  let column = 0;
  const place = (node, depth) => {
    const below = node.kids.map((child) => place(child, depth + 1));
    const x = below.length ? (below[0].x + below.at(-1).x) / 2 : (column += 1) - 1;
    const here = { node, x, depth };
    placed.push(here);
    for (const child of below) lines.push([here, child]);
    return here;
  };
  const [first] = roots.map((root) => place(root, 0));
  const depth = Math.max(...placed.map((one) => one.depth)) + 1;
  const [width, height] = [column * WIDE + GAP * 2, depth * HIGH + GAP];
  const at = ({ x, depth: row }) => [GAP + x * WIDE + WIDE / 2, GAP + row * HIGH + 16];

  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, width, height, class: 'graph', role: 'group', 'aria-label': t('org') });
  for (const [parent, child] of lines) {
    const [x1, y1] = at(parent);
    const [x2, y2] = at(child);
    svg.append(s('path', { class: 'edge', d: `M${x1} ${y1 + 58}C${x1} ${y1 + 80} ${x2} ${y2 - 40} ${x2} ${y2 - 18}` }));
  }
  for (const one of placed) svg.append(nodeOf(one, at(one)));
  // The first drawing shows the root; a redraw keeps the scroll position.
  const scrolled = stage.querySelector('.graph-frame')?.scrollLeft;
  const frame = h('div', { class: 'graph-frame', tabindex: '0', role: 'region', 'aria-label': t('org') }, svg);
  fill(stage, frame);
  frame.scrollLeft = scrolled ?? at(first)[0] - frame.clientWidth / 2;
}

function nodeOf({ node: { agent } }, [x, y]) {
  const link = s('a', { href: agentPath(agent.id), class: `node node-${agent.state}` });
  const name = s('text', { x, y: y + 32, class: 'node-name' });
  name.textContent = agent.name.length > 16 ? `${agent.name.slice(0, 15)}…` : agent.name;
  const state = s('text', { x, y: y + 50, class: 'node-state' });
  state.textContent = doing(agent).slice(0, 20);
  const title = s('title', {});
  title.textContent = [`${agent.name}: ${doing(agent)}`, agent.description].filter(Boolean).join('\n');
  link.append(title, s('circle', { cx: x, cy: y, r: 14 }), name, state);
  return link;
}
