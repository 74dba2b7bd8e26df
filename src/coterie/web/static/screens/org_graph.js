// The organisation as a drawing: parents above, leaves side by side. Every node is a link to its conversation.

import { h } from '../dom.js';
import { doing } from '../header.js';
import { t } from '../i18n.js';
import { agentPath } from '../router.js';
;

const SVG = 'http://www.w3.org/2000/svg';
const [WIDE, HIGH, GAP] = [148, 96, 24];

export function drawGraph(roots) {
  const placed = [];
  const lines = [];
  let column = 0;
  const place = (node, depth) => {
    const below = node.children.map((child) => place(child, depth + 1));
    const x = below.length ? (below[0].x + below.at(-1).x) / 2 : (column += 1) - 1;
    const here = { node, x, depth };
    placed.push(here);
    for (const child of below) lines.push([here, child]);
    return here;
  };
  roots.forEach((root) => place(root, 0));
  const depth = Math.max(...placed.map((one) => one.depth)) + 1;
  const [width, height] = [column * WIDE + GAP * 2, depth * HIGH + GAP];
  const at = ({ x, depth: row }) => [GAP + x * WIDE + WIDE / 2, GAP + row * HIGH + 16];

  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, width, height, class: 'graph', role: 'group', 'aria-label': t('org') });
  for (const [parent, child] of lines) {
    const [x1, y1] = at(parent);
    const [x2, y2] = at(child);
    svg.append(s('path', { class: 'edge', d: `M${x1} ${y1}C${x1} ${y1 + 44} ${x2} ${y2 - 44} ${x2} ${y2}` }));
  }
  for (const one of placed) svg.append(nodeOf(one, at(one)));
  return h('div', { class: 'graph-frame', tabindex: '0', role: 'region', 'aria-label': t('org') }, svg);
}

function nodeOf({ node: { agent } }, [x, y]) {
  const link = s('a', { href: agentPath(agent.id), class: `node node-${agent.state}` });
  const name = s('text', { x, y: y + 32, class: 'node-name' });
  name.textContent = agent.name.length > 16 ? `${agent.name.slice(0, 15)}…` : agent.name;
  const state = s('text', { x, y: y + 50, class: 'node-state' });
  state.textContent = doing(agent).slice(0, 20);
  const title = s('title', {});
  title.textContent = `${agent.name}: ${doing(agent)}`;
  link.append(title, s('circle', { cx: x, cy: y, r: 14 }), name, state);
  return link;
}

function s(tag, attributes) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  return el;
}
