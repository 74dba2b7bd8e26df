// Who belongs to whom: as a tree to walk through, or as a drawing.

import { button, fill, h, icon } from '../dom.js';
import { t } from '../i18n.js';
import { doing, dot } from '../header.js';
import { agentPath, go } from '../router.js';
import { on, state } from '../state.js';
import { empty } from './parts.js';
import { drawGraph } from './org_graph.js';

const SHOWN = 'coterie.org';
const CAPABILITIES = { text: 'text', vision: 'image', audio: 'audio', file: 'file' };

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
    if (graph) return fill(stage, drawGraph(roots));
    const inside = stage.contains(document.activeElement);
    const visible = flat(roots, folded);
    if (!visible.some(({ agent }) => agent.id === current)) current = visible[0].agent.id;
    fill(stage, h('ul', { class: 'org-tree', role: 'tree', 'aria-label': t('org'), onkeydown: keys }, visible.map(row)));
    if (inside) focus();
  };
  const row = ({ agent, level, children }) =>
    h(
      'li',
      {
        role: 'treeitem',
        class: `org-row org-level-${Math.min(level, 8)}`,
        'aria-level': String(level),
        'aria-expanded': children.length ? String(!folded.has(agent.id)) : null,
        'aria-selected': String(agent.id === current),
        tabindex: agent.id === current ? '0' : '-1',
        data: { agent: agent.id },
        onclick: () => go(agentPath(agent.id)),
      },
      children.length ? h('span', { class: 'fold', 'aria-hidden': 'true', text: folded.has(agent.id) ? '▸' : '▾', onclick: (event) => (event.stopPropagation(), fold(agent.id)) }) : h('span', { class: 'fold' }),
      dot(agent),
      h('span', { class: 'org-name', dir: 'auto', text: agent.name }),
      h('span', { class: 'meta', text: doing(agent) }),
      agent.waiting > 0 && h('span', { class: 'tag queued', text: t('orgWaiting', { n: agent.waiting }) }),
      agent.delayed > 0 && h('span', { class: 'tag', text: t('orgDelayed', { n: agent.delayed }) }),
      capabilities(agent),
    );
  const focus = () => stage.querySelector('[tabindex="0"]')?.focus();
  const fold = (id) => {
    if (!folded.delete(id)) folded.add(id);
    draw();
  };
  const keys = (event) => {
    const visible = flat(family(), folded);
    const at = visible.findIndex(({ agent }) => agent.id === current);
    const { agent, children } = visible[at];
    const to = (index) => visible[Math.max(0, Math.min(visible.length - 1, index))].agent.id;
    if (event.key === 'Enter' || event.key === ' ') go(agentPath(agent.id));
    else if (event.key === 'ArrowDown') current = to(at + 1);
    else if (event.key === 'ArrowUp') current = to(at - 1);
    else if (event.key === 'Home') current = to(0);
    else if (event.key === 'End') current = to(visible.length - 1);
    else if (event.key === 'ArrowRight' && children.length) folded.has(agent.id) ? folded.delete(agent.id) : (current = to(at + 1));
    else if (event.key === 'ArrowLeft') children.length && !folded.has(agent.id) ? folded.add(agent.id) : (current = parentOf(agent) ?? current);
    else if (event.key.length === 1 && !event.ctrlKey && !event.altKey && !event.metaKey) current = typed(visible, at, event.key) ?? current;
    else return;
    event.preventDefault();
    draw();
    focus();
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

const parentOf = (agent) => (state.agents.has(agent.parent) ? agent.parent : null);

/** Agents under their parents; one whose parent is not known stands on its own. */
function family() {
  const nodes = new Map();
  for (const agent of state.agents.values()) if (agent.kind !== 'person') nodes.set(agent.id, { agent, children: [] });
  const roots = [];
  for (const node of nodes.values()) (nodes.get(node.agent.parent)?.children ?? roots).push(node);
  return roots;
}

function flat(nodes, folded, level = 1) {
  return nodes.flatMap((node) => [{ ...node, level }, ...(folded.has(node.agent.id) ? [] : flat(node.children, folded, level + 1))]);
}

function typed(visible, at, letter) {
  const after = [...visible.slice(at + 1), ...visible.slice(0, at + 1)];
  return after.find(({ agent }) => agent.name.toLowerCase().startsWith(letter.toLowerCase()))?.agent.id;
}

function capabilities(agent) {
  const reads = (agent.capabilities?.input ?? []).filter((name) => CAPABILITIES[name]);
  const label = `${t('takesIn')}: ${reads.map((name) => t(`cap_${name}`)).join(', ')}`;
  return h('span', { class: 'org-caps', role: 'img', 'aria-label': label, title: label }, reads.map((name) => icon(CAPABILITIES[name])));
}
